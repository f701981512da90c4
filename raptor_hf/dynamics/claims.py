"""What arXiv 2512.19941 says of depth as a dynamical system, and whether it holds of the model at hand."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
from scipy.stats import spearmanr

HOLDS, PARTLY, FAILS, NOT_MEASURED = "holds", "holds in part", "does not hold", "not measured"
# The thresholds of the verdicts: this package's reading of the paper's words, not the paper's numbers.
THRESHOLDS = {
    "rank_correlation": 0.9,
    "late_turn": 1.5,
    "coherence": 0.5,
    "coherence_rise": 0.1,
    "late_rank": 10.0,
    "largest_modulus": 1.05,
    "median_modulus": 0.8,
    "p_value": 0.05,
    "basin_ratio": 0.9,
}


@dataclass
class Part:
    """One number that a verdict rests on: `what`, its `value`, and whether it meets the `threshold`, in words."""

    what: str
    value: float
    threshold: str
    holds: bool


@dataclass
class Claim:
    """A claim of the paper, in our words, what was measured, in a sentence made of the numbers, and the verdict."""

    name: str
    paper: str
    measured: str
    parts: list[Part] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        met = [part.holds for part in self.parts]
        if not met:
            return NOT_MEASURED
        return HOLDS if all(met) else PARTLY if any(met) else FAILS

    def as_dict(self) -> dict:
        return asdict(self) | {"verdict": self.verdict}


def check_claims(result: dict) -> list[dict]:
    """
    The claims, checked on what was measured of one model.

    Args:
        result: as [`TrajectoryDynamics.compute`] gives it; with `self_correction`, as [`SelfCorrection.compute`] does,
            if that was measured, or `not_run_on`, why it couldn't be.

    Returns:
        For each claim `name`, `paper`, `measured`, `parts` (each `what`, `value`, `threshold`, `holds`) and `verdict`:
        it holds if all of its parts do, in part if some do.
    """
    return [check(result).as_dict() for check in CHECKS]


def early_and_late(result: dict) -> tuple[slice, slice, str, str]:
    """The layers (as indices from 0) of the first and of the last phase; of a single phase, thirds of the depth."""
    sizes = result["phase_sizes"]
    depth = sum(sizes)
    if len(sizes) > 1:
        return slice(0, sizes[0]), slice(depth - sizes[-1], depth), "first phase", "last phase"
    third = max(1, depth // 3)
    return slice(0, third), slice(depth - third, depth), "first third", "last third"


def directional_convergence(result: dict) -> Claim:
    claim = Claim(
        "directional convergence",
        "Going through the layers, each token's direction draws ever nearer to the one it ends in.",
        "",
    )
    least, said = THRESHOLDS["rank_correlation"], []
    for name, token in result["tokens"].items():
        cosine = token["convergence"]["mean"]
        # Tokens that never turn have no correlation: they draw nearer to nothing.
        correlation = float(spearmanr(range(len(cosine)), cosine).statistic) if np.ptp(cosine) > 1e-9 else 0.0
        what = f"{name}: rank correlation of depth with the cosine to the last state"
        claim.parts.append(Part(what, correlation, f"at least {least}", correlation >= least))
        middle = len(cosine) // 2
        walk = token["orthogonal_convergence"]["mean"][middle]
        said.append(
            f"{name} from {cosine[0]:.2f} at the embeddings to {cosine[middle]:.2f} at layer {middle} (steps at right "
            f"angles would give {walk:.2f}) and {cosine[-2]:.2f} one layer before the last"
        )
    claim.measured = f"The cosine to the last state goes, for {_list(said)}."
    return claim


def late_reorientation(result: dict) -> Claim:
    claim = Claim(
        "late cls reorientation",
        "The cls token turns sharply in late layers, while the patch tokens go on smoothly.",
        "The model has no cls token, or too few layers to tell late ones from middle ones.",
    )
    tokens, depth = result["tokens"], sum(result["phase_sizes"])
    if "cls" not in tokens or depth < 6:
        return claim
    first_late, first_middle = depth - depth // 3, depth // 3
    ratios, said = {}, []
    for name in ("cls", "patch"):
        speed = np.degrees(tokens[name]["angular_speed"]["mean"])
        typical = float(np.median(speed[first_middle:first_late]))
        peak = first_late + int(speed[first_late:].argmax())
        ratios[name] = float(speed[peak]) / max(typical, 1e-9)
        said.append(
            f"the fastest of the last {depth - first_late} layers turns {name} by {speed[peak]:.1f}° (layer "
            f"{peak + 1}), {ratios[name]:.2f} times the median of the middle layers, {typical:.1f}°"
        )
    least = THRESHOLDS["late_turn"]
    what = "cls: fastest late turn, in median turns of the middle layers"
    claim.parts.append(Part(what, ratios["cls"], f"at least {least}", ratios["cls"] >= least))
    excess = ratios["cls"] / max(ratios["patch"], 1e-9)
    claim.parts.append(Part("the same of cls over that of patch", excess, "above 1", excess > 1))
    claim.measured = _capital(_list(said)) + "."
    return claim


def patch_coherence(result: dict) -> Claim:
    claim = Claim(
        "patch coherence",
        "In late layers the patch tokens move together, along their mean, as in a mean field.",
        "An image has a single patch token.",
    )
    patch = result["tokens"]["patch"]
    if "coherence" not in patch:
        return claim
    early, late, early_name, late_name = early_and_late(result)
    coherence, field_ = patch["coherence"]["mean"], patch["mean_field_alignment"]["mean"]
    before, after = float(np.mean(coherence[early])), float(np.mean(coherence[late]))
    strong, rise = THRESHOLDS["coherence"], THRESHOLDS["coherence_rise"]
    claim.parts = [
        Part(f"coherence of patch updates, {late_name}", after, f"at least {strong}", after >= strong),
        Part(f"its rise from the {early_name}", after - before, f"at least {rise}", after - before >= rise),
    ]
    claim.measured = (
        f"Patch coherence {_goes(before, after)} from {before:.2f} in the {early_name} to {after:.2f} in the "
        f"{late_name} (independent updates would give {patch['isotropic_coherence']:.2f}); the cosine of patches to "
        f"their mean direction goes from {field_[0]:.2f} at the embeddings to {field_[-1]:.2f} at the last layer."
    )
    return claim


def low_rank_updates(result: dict) -> Claim:
    early, late, early_name, late_name = early_and_late(result)
    patch = result["tokens"]["patch"]
    before, after = (float(np.mean(patch["stable_rank"][span])) for span in (early, late))
    effective = [float(np.mean(patch["effective_rank"][span])) for span in (early, late)]
    most = THRESHOLDS["late_rank"]
    parts = [
        Part(f"stable rank of patch updates, {late_name}", after, f"at most {most:g}", after <= most),
        Part(f"the same over that of the {early_name}", after / max(before, 1e-9), "below 1", after < before),
    ]
    measured = (
        f"The stable rank of patch updates {_goes(before, after)} from {before:.1f} in the {early_name} to "
        f"{after:.1f} in the {late_name}, their effective rank goes from {effective[0]:.0f} to {effective[1]:.0f}, of "
        f"{patch['largest_rank']} possible."
    )
    return Claim("low-rank late updates", "Late updates live in few dimensions, about six.", measured, parts)


def weak_contraction(result: dict) -> Claim:
    claim = Claim(
        "weak contraction",
        "The best linear map between consecutive states contracts weakly: its eigenvalues lie on the unit circle or "
        "just inside.",
        "",
    )
    most, least, said = THRESHOLDS["largest_modulus"], THRESHOLDS["median_modulus"], []
    for name, token in result["tokens"].items():
        depth = token["dmd"]["depth"]
        if not depth["moduli"]:
            continue
        largest, median = depth["moduli"][0], float(np.median(depth["moduli"]))
        modes = len(depth["moduli"])
        claim.parts += [
            Part(f"{name}: largest modulus, all depth", largest, f"at most {most}", largest <= most),
            Part(f"{name}: median modulus, all depth", median, f"at least {least}", median >= least),
        ]
        said.append(
            f"{name} from {depth['moduli'][-1]:.2f} to {largest:.2f}, median {median:.2f} ({modes} modes, which hold "
            f"{_percent(depth['energy'])}; the map explains {_percent(depth['explained'])}; with the growth of "
            f"norms the largest is {token['dmd_with_growth']['depth']['moduli'][0]:.2f})"
        )
    claim.measured = f"Over all depth, the growth of norms divided out, moduli go for {_list(said)}."
    return claim


def self_correction(result: dict) -> Claim:
    claim = Claim(
        "self-correction",
        "A trajectory that is pushed a little aside comes back towards where it would have been.",
        result.get("not_run_on", "The model was not run on from pushed states."),
    )
    said = []
    measured = {name: entries for name, entries in result.get("self_correction", {}).items() if entries}
    for name, entries in measured.items():
        eps = min(entry["eps"] for entry in entries)
        smallest = [entry for entry in entries if entry["eps"] == eps]
        for entry in smallest:
            total, high = entry["total"]["mean"], entry["total"]["high"]
            what = f"{name}: a push of {eps:g} at layer {entry['start']} is multiplied by the last layer by"
            claim.parts.append(Part(what, total, "below 1, and the 95 % band too", high is not None and high < 1))
        totals = ", ".join(f"{entry['total']['mean']:.2f} (from layer {entry['start']})" for entry in smallest)
        said.append(f"for {name} {totals}")
    if said:
        claim.measured = f"By the last layer a push of {eps:g} is multiplied by, {_list(said)}."
    return claim


def boundary_alignment(result: dict) -> Claim:
    claim = Claim(
        "jumps at phase boundaries",
        "Phases are phases of the dynamics too: where they meet, the speed at which tokens turn jumps.",
        "",
    )
    most, said = THRESHOLDS["p_value"], []
    for name, token in result["tokens"].items():
        test = token["boundaries"]["angular_speed"]
        if test["p_value"] is None:
            claim.measured = "There are no cuts, or no other places to compare them with."
            return claim
        jumps = [math.degrees(test[where]) for where in ("at_cuts", "elsewhere")]
        p = test["p_value"]
        said.append(f"{name} {jumps[0]:.1f}° at the cuts and {jumps[1]:.1f}° elsewhere (p = {p:.2g})")
        if test["smallest_p_value"] <= most:
            what = f"{name}: p value of the jumps of angular speed at the cuts"
            claim.parts.append(Part(what, p, f"at most {most}", p <= most))
    claim.measured = f"From layer to layer the angular speed changes, for {_list(said)}."
    if not claim.parts:
        claim.measured += f" So few layers allow no p value below {test['smallest_p_value']:.2g}."
    return claim


def angular_basins(result: dict) -> Claim:
    claim = Claim(
        "class-dependent basins",
        "Images of one class end in directions nearer to each other than to those of other classes.",
        "There were no labels, or no two images of one class.",
    )
    name = next(iter(result["tokens"]))
    basins = result["tokens"][name]["basins"]
    if basins["within"] is None or basins["between"] is None:
        return claim
    # At layer 0 the cls token is the same for all images.
    within, between = (np.degrees(np.arccos(np.clip(basins[key], -1, 1))) for key in ("within", "between"))
    first, last = (float(within[i] / max(between[i], 1e-9)) for i in (1, -1))
    most = THRESHOLDS["basin_ratio"]
    claim.parts = [
        Part(f"{name}: angle within over between classes, last layer", last, f"at most {most}", last <= most),
        Part("the same over that of layer 1", last / max(first, 1e-9), "below 1", last < first),
    ]
    claim.measured = (
        f"At the last layer the mean cosine of two images, as an angle of their {name} directions, is "
        f"{within[-1]:.1f}° within and {between[-1]:.1f}° between the {basins['classes']} classes; at layer 1 it is "
        f"{within[1]:.1f}° and {between[1]:.1f}°."
    )
    return claim


CHECKS: tuple[Callable[[dict], Claim], ...] = (
    directional_convergence,
    late_reorientation,
    patch_coherence,
    low_rank_updates,
    weak_contraction,
    self_correction,
    boundary_alignment,
    angular_basins,
)


def _list(parts: list[str]) -> str:
    return "; ".join(parts)


def _goes(before: float, after: float) -> str:
    return "rises" if after > before else "falls"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
