"""The OpenAPI document of the page's HTTP interface."""

from __future__ import annotations

from typing import Any

from multiworld.web.worlds import VERSION

__all__ = ["document"]

_TEXT, _WHOLE, _NUMBER, _YES = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
)
_TIME = {"type": "number", "description": "seconds since 1970"}
_CAUSE = {"type": "string", "enum": ["", "crashed", "hung", "unreachable", "left", "failed"]}
_STATES = ["joining", "active", "broken", "closed", "failed", "gone"]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(of: Any) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _or_null(of: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [of, {"type": "null"}]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS = {
    "View": _object(
        version={"type": "integer", "const": VERSION}, now=_TIME, kind={"enum": ["run", "process"]}, title=_TEXT,
        note={"type": "string", "description": "what the server has trouble with"}, run=_or_null(_ref("Run")),
        processes=_list(_ref("Process")), worlds=_list(_ref("World")), faults=_list(_ref("Fault")),
        events=_list(_ref("Event")), totals={"type": "object", "description": "of a run: failures, restarts, nodes_lost, broken"},
    ),
    "Run": _object(
        run_id=_TEXT, node=_TEXT, entrypoint=_TEXT, restart={"enum": ["worker", "group", ""]},
        max_restarts=_WHOLE, started=_or_null(_TIME), seat=_or_null(_WHOLE), nodes=_WHOLE,
        secure={"type": "boolean", "description": "whether connections are TLS"},
        peers=_list(_object(node=_TEXT, seat=_or_null(_WHOLE), state={"enum": ["seated", "spare", "lost"]}, since=_TIME)),
        ended=_or_null(_object(exitcode=_WHOLE, reason=_TEXT)),
    ),
    "Process": _object(
        id={"type": "string", "description": "HOST/PID"},
        rank={**_or_null(_WHOLE), "description": "in the run"}, role=_TEXT, pid=_WHOLE, host=_TEXT,
        state={"enum": ["starting", "up", "failed", "restarting", "retiring", "ended", "stopped"]},
        since=_or_null(_TIME), restarts=_WHOLE, last=_TEXT, logs=_list({"enum": ["stdout", "stderr"]}),
    ),
    "World": _object(
        name=_TEXT, state={"enum": _STATES}, generation=_WHOLE, backend=_TEXT, size=_WHOLE,
        sizes={"type": "string", "description": "MIN:MAX where ranks are assigned, else empty"},
        since=_or_null(_TIME), note=_TEXT, cause=_CAUSE, detail=_TEXT, members=_list(_ref("Member")),
        candidates={"type": "integer", "description": "processes that wait to be let in"},
        left={**_YES, "description": "whether it is over for those that left it in good order, and no member of it was lost"},
        pending=_list(_ref("Pending")), links=_list(_ref("Link")),
        waited={"type": "object", "additionalProperties": _NUMBER, "description": "seconds, by rank"},
    ),
    "Member": _object(
        rank={"type": "integer", "description": "in the world; -1: not known"}, process=_TEXT,
        worker={**_or_null(_WHOLE), "description": "rank in the run"},
        state={"enum": [*_STATES, "busy", "lost"]}, generation=_WHOLE, seat=_TEXT, cause=_CAUSE, evidence=_TEXT,
        since=_or_null(_TIME), received={"type": "integer", "description": "bytes of the world's state"},
        total=_WHOLE,
    ),
    "Pending": _object(
        text=_TEXT, kind=_TEXT, number=_or_null(_WHOLE), size=_WHOLE, peer=_or_null(_WHOLE), tag=_or_null(_WHOLE),
        since=_TIME, waiting=_list(_WHOLE), missing={"type": "object", "additionalProperties": _TEXT}, idle=_YES,
    ),
    "Link": _object(
        **{"from": _WHOLE, "to": _WHOLE}, messages=_WHOLE, bytes=_WHOLE,
        rate={"type": "number", "description": "bytes per second"},
    ),
    "Fault": _object(
        id=_TEXT, world=_TEXT, generation=_WHOLE, cause=_CAUSE, ranks=_list(_WHOLE), detail=_TEXT, at=_TIME,
        steps=_list(_object(what={"enum": ["seen", "told", "unblocked", "joining", "active"]}, at=_TIME, ms=_NUMBER, text=_TEXT)),
        healed=_YES, ms=_or_null(_NUMBER),
        over={"type": "boolean", "description": "whether the world was closed since"},
    ),
    "Event": _object(id=_WHOLE, at=_TIME, world=_TEXT, level={"enum": ["debug", "info", "warning", "error"]}, text=_TEXT),
}  # fmt: skip


def document() -> dict[str, Any]:
    """Return the document."""
    text, health = (
        {"text/plain": {"schema": _TEXT}},
        "200: yes; 503: no, with the reason to those with the token",
    )
    world = {"name": "world", "in": "query", "schema": _list(_TEXT), "description": "default: all"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "multiworld",
            "version": f"{VERSION}.0",
            "description": "Worlds of a run or a process. It is read only.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"cookie": []}],
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "m8d_token_PORT"},
            },
        },
        "paths": {
            "/api/v1/view": _get("The present view.", _json(_ref("View"))),
            "/api/v1/events": _get(
                "Server-sent events: one `view`, then a `patch` at each change, and after 15 s without one; "
                "reconnecting begins anew. A patch has now, and of set (head), processes, processes_gone, worlds, worlds_gone, faults, faults_gone "
                "and events what has changed.",
                {"text/event-stream": {"schema": _TEXT}},
            ),
            "/api/v1/worlds/{name}/pending": _get(
                "Ask the members of a world what they wait for.",
                _json(_object(pending=_list(_ref("Pending")))), _in_path("name"), missing="no such world",
            ),
            "/api/v1/processes/{id}/log": _get(
                "The end of a worker's log.", text, _in_path("id"),
                {"name": "stream", "in": "query", "schema": {"enum": ["stdout", "stderr"]}},
                {"name": "bytes", "in": "query", "schema": _WHOLE}, missing="it has no such log",
            ),
            "/metrics": _get("Numbers for Prometheus.", text, missing="prometheus_client is not installed"),
            "/live": {**_get(f"Whether the server's process works. {health}.", text), "security": []},
            "/ready": {**_get(f"Whether these worlds can be worked in. {health}.", text, world), "security": []},
        },
    }  # fmt: skip


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _get(summary: str, content: Any, *parameters: Any, missing: str = "") -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if missing:
        responses["404"] = {"description": missing}
    return {"get": {"summary": summary, "parameters": list(parameters), "responses": responses}}
