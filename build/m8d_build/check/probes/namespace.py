"""torch.distributed.multiworld without the package multiworld, and with a stand-in of it.

usage: namespace.py FOLDER
"""

import importlib
import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
import torch.distributed

try:
    import torch.distributed.multiworld
except ModuleNotFoundError as exc:
    outcome = f"no {exc.name}"
except ImportError as exc:
    told = "pip install m8d" in str(exc)
    package = folder / "stand-in" / "multiworld"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("thing = object()\n")
    (package / "part.py").write_text("")
    (package / "shim.py").write_text("def attach():\n    attached.append(1)\nattached = []\n")
    sys.path.insert(0, str(package.parent))
    importlib.invalidate_caches()
    import multiworld
    import torch.distributed.multiworld as namespace
    from torch.distributed.multiworld import part

    same = (
        namespace.thing is multiworld.thing
        and part is sys.modules["multiworld.part"]
        and part.__spec__.name == "multiworld.part"
        and multiworld.shim.attached == [1]
    )
    outcome = f"{'says' if told else 'does not say'} what is missing, {'gives' if same else 'does not give'} its objects"
else:
    outcome = "imported without the package multiworld"
print("M8D " + json.dumps({"outcome": outcome}))
