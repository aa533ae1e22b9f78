"""What `rl_weights.py` is made of: a policy for CartPole, its trainer, the engines that play, and their deaths."""
