"""What joins multiworld to a torch installation. Here so far: reading a patched build's marker."""
