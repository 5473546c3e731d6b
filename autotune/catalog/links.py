"""Computes the bandwidth between the GPUs of one host from the kind and the width of their link.

A row of `data/gpus.yaml` names the link, such as `PCIe 4.0 x16`. If no bandwidth of the GPU was
published, the bandwidth follows from the link by the rule in this module. It is an estimate: hosts
differ, and a rule knows neither the processor nor the slots.
"""

import re
from dataclasses import dataclass

# The value of `link` if a host has only one such device.
NO_LINK = "none"

# GB/s in one direction of a lane (PCIe) or of a link (NVLink) in the tables of NCCL, which it uses
# to choose algorithms (src/graph/topo.h and topo.cc). The numbers contain the overhead of the
# protocol: a link of NVLink 4 transfers 25 GB/s, and 20.6 GB/s of them are data. An Infinity Fabric
# link of an MI300X transfers 64 GB/s, and AMD calls 48 GB/s of them usable. A link of an MI355X
# transfers 76.8 GB/s, and we assume that the same share is usable.
LANE_GB_S = {
    "PCIe 3.0": 0.75,
    "PCIe 4.0": 1.5,
    "PCIe 5.0": 3.0,
    "NVLink 2": 20.0,
    "NVLink 3": 20.0,
    "NVLink 4": 20.6,
    "NVLink 5": 40.1,
    "Infinity Fabric": 48.0,
    "Infinity Fabric 4": 57.6,
}

# Collectives reach this share of LANE_GB_S over PCIe. Published are 20 to 25 of 24 GB/s with PCIe 4
# x16, and 38 to 42 of 48 GB/s with PCIe 5 x16.
PCIE_SHARE = 0.9

# Without peer access, each byte crosses the host's memory. Two RTX 4090s exchanged 15 of 24 GB/s in
# each direction (nccl#814), and 8.4 of 12 GB/s with 8 lanes. Two RTX 5090s exchanged 15 of 24 GB/s
# with 8 lanes; four reached 35 of 48 GB/s and eight 28 (nccl#1639).
HOST_SHARE = 0.62

NO_PEER_ACCESS = "no peer access"
FORM = re.compile(
    rf"(?P<kind>{'|'.join(map(re.escape, LANE_GB_S))}) x(?P<width>[1-9][0-9]?)"
    rf"(?: \((?:(?P<hosted>{NO_PEER_ACCESS})|(?P<per_pair>[1-9][0-9]?) per pair)\))?"
)
EXAMPLES = "PCIe 4.0 x16, PCIe 4.0 x16 (no peer access), NVLink 4 x18, or none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The GB/s of collectives per GPU, by rule.

    All links of a GPU together have `gb_s`. If each pair of GPUs has links of its own, `pair_gb_s`
    is the bandwidth of one pair. Otherwise it is None.
    """

    gb_s: float
    pair_gb_s: float | None = None


def link_rate(link: str) -> LinkRate | None:
    """Return the bandwidth of a link by rule, in whole GB/s, or None for `none`.

    Raises ValueError if `link` has another form.
    """
    if link == NO_LINK:
        return None
    found = FORM.fullmatch(link)
    if found is None:
        raise ValueError(f"{link!r} is not a link: give {EXAMPLES}")

    share = 1.0
    if found["kind"].startswith("PCIe"):
        share = HOST_SHARE if found["hosted"] else PCIE_SHARE
    lane_gb_s = share * LANE_GB_S[found["kind"]]
    return LinkRate(
        gb_s=float(round(int(found["width"]) * lane_gb_s)),
        pair_gb_s=float(round(int(found["per_pair"]) * lane_gb_s)) if found["per_pair"] else None,
    )
