"""Settings of a server that other machines join."""

from __future__ import annotations

from dataclasses import dataclass

from luce.config.field import setting
from luce.config.values import choice, integer, number, text, tokens


@dataclass(frozen=True)
class ClusterSettings:
    """A part of luce.config.settings.Config."""

    cluster: str = setting(
        "",
        text,
        "let other machines join under this name and lend their devices: prints the command that joins one; needs the "
        "extra cluster",
        metavar="NAME",
        group="cluster",
    )
    cluster_listen: str = setting(
        "127.0.0.1:7443",
        text,
        "address for the machines that join; 0.0.0.0:7443 for those of all networks",
        metavar="HOST:PORT",
        group="cluster",
    )
    cluster_announce: bool = setting(
        False,
        text,
        "let machines of the local network find this server by mDNS, with a token of `luce cluster token --lan`",
        group="cluster",
    )
    cluster_min: int = setting(
        1, integer(0, 64), "machines that the load of the model waits for", metavar="N", group="cluster"
    )
    cluster_wait: float = setting(
        60.0,
        number(0, 86400),
        "longest wait for --cluster-min machines; then the model loads on the devices that are there",
        metavar="SECONDS",
        group="cluster",
    )
    cluster_stream: str = setting(
        "on",
        choice("on", "off"),
        "send members that lack the model file the weights of their layers (off: they are not used)",
        group="cluster",
    )
    cluster_stream_rate: float = setting(
        0.0,
        number(0, 1e6),
        "most MB/s of weights that are sent (0: no limit)",
        metavar="RATE",
        group="cluster",
    )
    cluster_resume: float = setting(
        120.0,
        number(0, 86400),
        "seconds that replies wait for a member that was lost, to go on then (0: they fail at once)",
        metavar="SECONDS",
        group="cluster",
    )
    cluster_replan: str = setting(
        "manual",
        choice("never", "manual", "auto"),
        "when layers go to other machines: never; by `luce cluster replan`, when a machine leaves, and when one stays "
        "away (manual); also when one has come that makes the model faster by 15 % (auto)",
        group="cluster",
    )
    cluster_on_loss: str = setting(
        "wait",
        choice("wait", "replan"),
        "a lost machine has 20 s to come back (wait), or none (replan); then the others get its layers, if they have "
        "room for them",
        group="cluster",
    )
    cluster_on_loss_context: int = setting(
        0,
        tokens(0),
        "context that the model may be loaded with when a machine stays away and its own context does not fit on the "
        "others (0: none, requests are refused until the machine is back)",
        metavar="TOKENS",
        group="cluster",
    )
    cluster_drain: float = setting(
        30.0,
        number(0, 86400),
        "seconds that running replies have to end before the model moves; those that run on are put aside, and go on "
        "behind it, or fail if the model has to be loaded anew",
        metavar="SECONDS",
        group="cluster",
    )
