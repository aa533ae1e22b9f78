"""Messages of tensors over the members' own connection; a part of `multiworld._c10d`."""
