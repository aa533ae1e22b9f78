"""Version of the installed torch in three places, and m8d_patch_info() through the loader."""

import ctypes
import importlib.metadata
import json
import os

import torch

library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so"))
try:
    call = library.m8d_patch_info
except AttributeError:
    said = "no patch info"
else:
    call.restype = ctypes.c_char_p
    info = json.loads(call().decode())
    said = f"patch info {info['torch']}: {', '.join(info['topics'])}"
stated = importlib.metadata.version("torch")
version = str(torch.__version__)
# Official wheels leave the local label out of METADATA.
agrees = stated == version or stated == version.partition("+")[0]
outcome = f"{version}, {said}" if agrees else f"{version} but METADATA says {stated}, {said}"
print("M8D " + json.dumps({"outcome": outcome, "git_version": torch.version.git_version}))
