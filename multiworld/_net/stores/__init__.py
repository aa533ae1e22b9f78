"""Stores, at which the members of a world meet: servers and clients, the rendezvous."""
