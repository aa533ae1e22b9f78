"""Import torch with the exits library preloaded; says which of a library's objects would be destroyed twice at the end.

usage: exits.py LIBRARY
"""

import ctypes
import json
import sys

import torch  # noqa: F401  (loaded for what it does to the process)

watch = ctypes.CDLL(None)  # the preloaded library
watch.m8d_destroyed_twice.restype = ctypes.c_char_p
watch.m8d_destructors.restype = ctypes.c_long
number = watch.m8d_destructors()
twice = [said for said in watch.m8d_destroyed_twice().decode().split(", ") if sys.argv[1] in said]
outcome = f"twice: {', '.join(twice)}" if twice else "each object once"
print(
    "M8D "
    + json.dumps(
        {"outcome": outcome if number > 100 else f"only {number} objects were seen", "objects": number}
    )
)
