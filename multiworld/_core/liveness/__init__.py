"""Which members are alive: the protocol between watchdogs, and the failure detector."""
