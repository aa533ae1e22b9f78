"""Import torch from a given folder; a failure that names a missing library is an outcome.

usage: import_torch.py FOLDER LIBRARY
"""

import json
import sys

folder, library = sys.argv[1:]
sys.path.insert(0, folder)
try:
    import torch
except (ImportError, OSError) as exc:
    outcome = f"refused, naming {library}" if library in str(exc) else f"refused: {exc}"
else:
    outcome = "imported" if torch.__file__.startswith(folder) else f"imported from {torch.__file__}"
print("M8D " + json.dumps({"outcome": outcome}))
