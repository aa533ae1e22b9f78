"""The lane's connections, and who reads and writes them (`multiworld._core.lane` is the protocol)."""
