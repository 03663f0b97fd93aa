"""Kernel times as text, beside the limit that pruning could reach."""

from __future__ import annotations

LEGEND = """Medians in ms. f: forward, f+b: forward + backward, boundary search inside. Limit: the fastest
without gates, such as fa4 or cudnn, x (1 - pruned share). TFLOP/s of f+b: effective, of the blocks that are
computed; nominal, as if none were pruned (the triangle of 2 + 5 products). dgate: error of the gate gradient.
Over the kept: time with ACP over that of the blocks it keeps, exact x (1 - pruned share); 1 is ideal. Search:
boundary search and running sum of the gates, over forward + backward ("auto": also the norms of q and k).
Host: until the host has a call behind it, the GPU still at work; f without gradients."""


_HEADER = "f f+b pruned limit_f limit_f+b ratio effective nominal dgate host_f host_f+b"


def table(records: list[dict]) -> str:
    """One line a record, with the limit if a rival without gates was timed."""
    columns = "{:<10} {:<20}{:>9}{:>10}{:>8}{:>10}{:>10}{:>8}{:>11}{:>9}{:>8}{:>8}{:>10}"
    lines = [columns.format("", "", *(name.replace("_", " ") for name in _HEADER.split()))]
    gateless = [r for r in records if r["method"] == "no gates"]
    fastest = min(gateless, key=lambda r: r["forward_backward_ms"], default=None)
    for r in records:
        left, both, gate = 1 - r["pruned_ratio"], r["forward_backward_ms"], r["gate_gradient_error"]
        limit = ["", "", ""]
        if fastest:
            forward, backward = (fastest[k] * left for k in ("forward_ms", "forward_backward_ms"))
            limit = [f"{forward:.2f}", f"{backward:.2f}", f"{both / backward:.2f}"]
        nominal = r["nominal_forward_backward_tflop"] / (both / 1e3)
        numbers = (f"{r['forward_ms']:.2f}", f"{both:.2f}", f"{r['pruned_ratio']:.3f}", *limit)
        rates = (f"{nominal * left:.4g}", f"{nominal:.4g}", "" if gate is None else f"{100 * gate:.1f} %")
        host = [
            "" if (x := r[f"{k}_host_ms"]) is None else f"{x:.3f}" for k in ("forward", "forward_backward")
        ]
        lines.append(columns.format(r["implementation"], r["method"], *numbers, *rates, *host))
    return "\n".join(lines + [x for r in records for x in _how_skipping_pays(r, records)])


def _how_skipping_pays(r: dict, records: list[dict]) -> list[str]:
    """A line that compares a pruned record with its exact pair."""
    exact = [x for x in records if x["method"] == "exact" and x["implementation"] == r["implementation"]]
    if not (r["method"].startswith("acp") and exact):
        return []
    left, parts = 1 - r["pruned_ratio"], []
    for name, take_ms in (
        ("forward", lambda x: x["forward_ms"]),
        ("backward", lambda x: x["forward_backward_ms"] - x["forward_ms"]),
    ):
        ours, ideal = take_ms(r), left * take_ms(exact[0])
        parts.append(f"{name} {ours:.2f} / {ideal:.2f} = {ours / ideal:.2f}")
    if r["search_ms"]:
        share = r["search_ms"] / r["forward_backward_ms"]
        parts.append(f"search {1e3 * r['search_ms']:.0f} microseconds, {100 * share:.1f} %")
    return [f"{r['implementation']} {r['method']}, over the kept: {'; '.join(parts)}"]
