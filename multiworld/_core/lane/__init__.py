"""The lane's protocol: messages between members over connections of their own.

Pure: no I/O, no clock, no torch.
"""
