"""Check that bytes are a ``torch.save`` archive before they reach ``torch.load(weights_only=True)``.

Up to torch 2.5 `weights_only` binds the unpickler only: a tar of torch's earliest format is unpacked to
wherever its names lead (CVE-2025-32434), and an archive of TorchScript is loaded with its code. From 2.6 on
torch refuses both.
"""

from __future__ import annotations

from typing import IO

import torch

__all__ = ["is_plain"]

_ZIP = b"PK\x03\x04"
_TORCHSCRIPT = "constants.pkl"  # what torch itself tells such an archive by


def is_plain(stream: IO[bytes]) -> bool:
    """Whether `stream` holds a zip archive of ``torch.save``, and none of TorchScript. Rewinds it.

    The reader is torch's, so that this and ``torch.load`` see the same records.
    """
    stream.seek(0)
    is_zip = stream.read(len(_ZIP)) == _ZIP
    stream.seek(0)
    if not is_zip:
        return False
    try:
        records = torch._C.PyTorchFileReader(stream).get_all_records()
    except RuntimeError:  # broken: nothing to read
        return False
    finally:
        stream.seek(0)
    return _TORCHSCRIPT not in records
