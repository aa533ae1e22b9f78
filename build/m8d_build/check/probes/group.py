"""Load the AutoNcclGroup extension before or after torch and call one of its functions.

usage: group.py EXTENSION first|last FUNCTION
"""

import ctypes
import json
import sys

extension, order, function = sys.argv[1:]
if order == "first":
    library = ctypes.CDLL(extension)
import torch  # noqa: F401  (loaded for what it does to the process)

if order == "last":
    library = ctypes.CDLL(extension)
call = getattr(library, function)
call.restype = ctypes.c_char_p
print("M8D " + json.dumps({"outcome": call().decode()}))
