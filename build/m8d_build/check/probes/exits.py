"""Import torch with the exits library preloaded; says which objects would be destroyed twice at the end."""

import ctypes
import json

import torch  # noqa: F401

watch = ctypes.CDLL(None)  # the preloaded library
watch.m8d_destroyed_twice.restype = ctypes.c_char_p
watch.m8d_destructors.restype = ctypes.c_long
number = watch.m8d_destructors()
twice = watch.m8d_destroyed_twice().decode()
outcome = f"twice: {twice}" if twice else "each object once"
print("M8D " + json.dumps({"outcome": outcome if number > 100 else f"only {number} were seen", "objects": number}))
