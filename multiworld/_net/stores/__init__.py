"""Where the members of a world meet: stores, their server and clients, the rendezvous."""
