"""Parts of `rl_weights.py`: a policy for CartPole, its trainer, the engines that play, and their deaths."""
