"""The nodes of a run: slots, membership, the rendezvous, links between launchers."""
