"""The statement of an installed patched torch, and whether its files are still those that were built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from multiworld.errors import ProvenanceError
from multiworld.provenance.statement import STATEMENT_NAME, contradictions, parse_statement
from multiworld.provenance.wheel import file_digest
from multiworld.shim.loader import LOADER_ENTRY

if TYPE_CHECKING:
    from multiworld._c10d.marker import Marker
    from multiworld.shim.torchsite import TorchSite

__all__ = ["InstalledProvenance", "check_installed"]


@dataclass(frozen=True)
class InstalledProvenance:
    """What was compared.

    Attributes:
        files: how many files the statement names, below ``torch``.
        faults: where they differ from the statement, one sentence each.
    """

    files: int
    faults: tuple[str, ...] = ()


def check_installed(site: TorchSite, marker: Marker) -> InstalledProvenance | None:
    """Compare a patched torch's files with the statement of its wheel; libtorch_cuda.so takes a second.

    The loader of ``torch.distributed.multiworld`` is not compared: ``m8d-post-setup`` may have changed it.

    Returns:
        None where its wheel was made without a statement.
    """
    path = site.dist_info / STATEMENT_NAME
    try:
        statement = parse_statement(path.read_bytes(), where=str(path))
    except FileNotFoundError:
        return None
    except OSError as exc:
        return InstalledProvenance(0, (f"{path} cannot be read: {exc.strerror}",))
    except ProvenanceError as exc:
        return InstalledProvenance(0, (str(exc),))
    names = [name for name in statement.subjects if name.startswith("torch/") and name != LOADER_ENTRY]
    digests, faults = {}, []
    for name in names:
        if (site.root / name).is_file():
            try:
                digests[name] = file_digest(site.root / name)
            except ProvenanceError as exc:
                faults.append(str(exc))
    # The files of its dist-info folder are the installer's.
    compared = replace(statement, subjects={name: statement.subjects[name] for name in names})
    return InstalledProvenance(len(names), (*faults, *contradictions(compared, marker, digests)))
