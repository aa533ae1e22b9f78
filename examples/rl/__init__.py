"""A game, a player and a learner, all as small as they can be."""
