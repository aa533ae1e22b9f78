"""Where the certificates of a run come from, by its options and settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.run.errors import ArgumentsError

__all__ = ["Source", "choose_source"]


@dataclass(frozen=True)
class Source:
    """Where the certificates of this node's processes come from.

    Attributes:
        kind: "run": an authority that the launcher makes for this run; "folder": the authority in `folder`;
            "files": those that M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA name, for all processes.
        folder: path of the authority's folder.
    """

    kind: str
    folder: str = ""


def choose_source(*, secure: bool, authority: str | None, files: bool, nodes: int) -> Source | None:
    """Return where the certificates come from; None: connections are not TLS.

    Args:
        secure: whether --secure is given.
        authority: of --authority.
        files: whether M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA are set.
        nodes: most nodes of the run.

    Raises:
        ArgumentsError: there are two sources, or one that cannot serve several nodes.
    """
    if authority is not None:
        if files:
            raise ArgumentsError(
                f"--authority {authority} with M8D_TLS_CERT set",
                rule="A run has its certificates from one place",
                next_step="Leave --authority out, or unset M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA",
            )
        return Source("folder", authority)
    if files:
        return Source("files")
    if not secure:
        return None
    if nodes > 1:
        raise ArgumentsError(
            f"--secure on up to {nodes} nodes, without an authority that they share",
            rule="The launchers of all nodes have their certificates from the same authority",
            next_step="Run m8d-run make-authority DIR once, have DIR on every node, and give --authority "
            "DIR; or set M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA on every node",
        )
    return Source("run")
