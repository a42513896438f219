"""What every container of the stack is held to, as the engine tells it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from stack import Stack

MB = 2**20


def assert_limits_and_rights(
    stack: Stack, service: str, *, memory_mb: int, networks: Set[str], volumes: Set[str]
) -> dict[str, Any]:
    """Networks and volumes without the project's name. What `docker inspect` says, for what holds of one service."""
    found: dict[str, Any] = stack.inspect(service)
    host, config = found["HostConfig"], found["Config"]
    assert config["User"].split(":")[0] not in ("", "0", "root")
    assert host["CapDrop"] == ["ALL"]
    assert host["Privileged"] is False
    assert host["ReadonlyRootfs"] is True
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] == memory_mb * MB
    assert 0 < host["PidsLimit"] <= 256
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-file": "3", "max-size": "10m"}}
    assert set(found["NetworkSettings"]["Networks"]) == {f"{stack.project}_{name}" for name in networks}
    assert not any("docker.sock" in mount["Source"] for mount in found["Mounts"])
    # a volume without a name is one that nobody knows of, and that an upgrade loses
    named = {m["Name"] for m in found["Mounts"] if m["Type"] == "volume"}
    assert named <= {f"{stack.project}_{name}" for name in volumes}
    return found
