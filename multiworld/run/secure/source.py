"""Source of a run's certificates, by its options and settings. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.run.errors import ArgumentsError

__all__ = ["CertificateSource", "choose_source"]


@dataclass(frozen=True)
class CertificateSource:
    """Where the certificates of this node's processes come from.

    Attributes:
        kind: "run": an authority that the launcher makes for this run; "folder": the authority in `folder`;
            "files": those that M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA name, for all processes.
        folder: path of the authority's folder.
    """

    kind: str
    folder: str = ""


def choose_source(
    *, secure: bool, authority: str | None, files: bool, nodes: int, run_id: str
) -> CertificateSource | None:
    """Return where the certificates come from; None: connections are not TLS.

    Args:
        secure: whether --secure is given.
        authority: of --authority.
        files: whether M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA are set.
        nodes: most nodes of the run.
        run_id: of the run; "none", torchrun's default on several nodes, tells no run from another.

    Raises:
        ArgumentsError: there are two sources, or one that cannot serve several nodes, or they share one and
            the run has no id that tells it from others.
    """
    if authority is not None:
        if files:
            raise ArgumentsError(
                f"--authority {authority} with M8D_TLS_CERT set",
                rule="A run has its certificates from one place",
                next_step="Leave --authority out, or unset M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA",
            )
        if nodes > 1 and run_id == "none":
            raise ArgumentsError(
                f"--authority {authority} on up to {nodes} nodes, with --rdzv-id none",
                rule="The id of the run is in each certificate, and keeps processes of other runs with this "
                "authority out",
                next_step="Give --rdzv-id, the same on all nodes, and another one for each run",
            )
        return CertificateSource("folder", authority)
    if files:
        return CertificateSource("files")
    if not secure:
        return None
    if nodes > 1:
        raise ArgumentsError(
            f"--secure on up to {nodes} nodes, without an authority that they share",
            rule="The launchers of all nodes have their certificates from the same authority",
            next_step="Run m8d-run make-authority DIR once, have DIR on every node, and give --authority "
            "DIR; or set M8D_TLS_CERT, M8D_TLS_KEY and M8D_TLS_CA on every node",
        )
    return CertificateSource("run")
