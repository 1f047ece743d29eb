"""How this machine joins a Ray cluster (--ray): what is refused, and of what a user is warned."""

import os
import socket
import subprocess
import sys

from config import LOAD_SECONDS, Config, UserError, first_line
from extras.nodes.node import describe_environment, find_difference

try:
    import ray
    from ray._private.services import get_ray_address_from_environment
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise UserError(
        f"--ray needs Ray, and that cannot be imported ({error}): "
        "pip install -r requirements/ray.txt"
    ) from error

CONNECT_SECONDS = 5.0  # for an address to answer


def check(config: Config) -> None:
    """Join the cluster, and compare what is installed on its nodes. Raises UserError."""
    options = dict(include_dashboard=False) if config.ray == "local" else {}
    try:
        check_address(config.ray)
        ray.init(address=config.ray, logging_level="ERROR", log_to_driver=False, **options)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        problem = f"no cluster was found: {first_line(error)}"
        raise UserError(f"--ray {config.ray}: {problem}") from error
    here, nodes = describe_environment(), other_nodes()
    for node in nodes:
        check_node(node, here)
    print(f"further nodes in the Ray cluster: {len(nodes)}", flush=True)


def check_address(address: str) -> None:
    """Refuse a host:port where nobody answers or the token is not ours; warn where it has none."""
    if address == "auto":  # RAY_ADDRESS, or the cluster that was last started on this machine
        address = get_ray_address_from_environment(address, None)
    if address == "local":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--ray is {address!r}: it is auto, local or host:port")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        problem = f"nobody answers there ({error}): see `ray status` on that machine"
        raise UserError(f"--ray {address}: {problem}") from error
    # Unset is disabled: for "auto" Ray would else take up a token that it finds.
    mode = os.environ.setdefault("RAY_AUTH_MODE", "disabled").lower()
    answers = {each: ask(address, each) for each in {mode, "disabled"}}
    see, is_open = "see docs/nodes.md", not answers["disabled"]
    # Who has a token is let into a cluster without one, but can start no actor there.
    if mode == "token" if is_open else "uthenticat" in answers[mode]:
        token = f"its token is not this machine's (RAY_AUTH_MODE is {mode!r} here)"
        raise UserError(f"--ray {address}: {token}: {see}")
    if is_open:
        print(f"warning: --ray {address}: whoever reaches it can run code there: {see}", flush=True)


def ask(address: str, mode: str) -> str:
    """Return "" if the cluster lets in a client with this RAY_AUTH_MODE, else what Ray says.

    In a process of its own: there Ray prints, and aborts where it finds no token.
    """
    code = f"from ray._raylet import GcsClient; GcsClient(address={address!r})"
    command, environment = [sys.executable, "-Pc", code], os.environ | {"RAY_AUTH_MODE": mode}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def other_nodes() -> list[dict]:
    """Return the living nodes of the cluster but this one."""
    own = ray.get_runtime_context().get_node_id()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]


def on_node(node: dict) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def check_node(node: dict, here: dict[str, str]) -> None:
    """Raise UserError for a node that has something else installed than this machine."""
    name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:6]})"
    options = dict(num_cpus=0, scheduling_strategy=on_node(node), max_retries=0)
    try:
        asked = ray.remote(find_difference).options(**options).remote(here)
        difference = ray.get(asked, timeout=LOAD_SECONDS)
    except RayError as error:
        if node["NodeID"] not in [other["NodeID"] for other in other_nodes()]:
            return  # it has just been lost
        raise UserError(
            f"--ray: {name} cannot run the project, which must lie at the same path there, with "
            f"the same environment: {last_line(error)}"
        ) from error
    if difference:
        raise UserError(f"--ray: {name} has {difference}")


def last_line(error: Exception) -> str:
    """The end of what Ray says: what was raised, if anything was."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__
