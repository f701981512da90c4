"""What arXiv 2512.19941 says of depth as a dynamical system, and whether it holds of the model at hand."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
from scipy.stats import spearmanr

HOLDS, PARTLY, FAILS = "holds", "holds in part", "does not hold"
UNDECIDED, NOT_MEASURED = "undecided", "not measured"
# The thresholds of the verdicts: this package's reading of the paper's words, not the paper's numbers.
THRESHOLDS = {
    "rank_correlation": 0.9,
    "beyond_orthogonal": 0.1,
    "late_turn": 1.5,
    "turn_over_patches": 1.25,
    "coherence": 0.5,
    "coherence_rise": 0.1,
    "late_rank": 10.0,
    "share_of_rank": 0.5,
    "rank_fall": 0.9,
    "explained": 0.5,
    "unexplained_ratio": 0.8,
    "largest_modulus": 1.05,
    "median_modulus": 0.8,
    "p_value": 0.05,
    "basin_ratio": 0.9,
    "basin_fall": 0.9,
}
# Fewer images than so many times the modes let a map explain anything; fewer a class, chance make basins.
IMAGES_OF_A_MODE, IMAGES_OF_A_CLASS = 2, 8
# What changes by no more than this share of itself is said to hardly change.
CHANGE = 0.1


@dataclass
class Part:
    """
    One number that a verdict rests on: `what`, its `value`, and whether it meets the `threshold`, in words; None where
    the confidence interval leaves that open.
    """

    what: str
    value: float
    threshold: str
    holds: bool | None


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
        return HOLDS if all(met) else PARTLY if any(met) else UNDECIDED if None in met else FAILS

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
        it holds if all of its parts do, in part if some do, and is undecided if none does but some are open.
    """
    # States that are 0 throughout point nowhere.
    tokens = {name: token for name, token in result["tokens"].items() if max(token["norm"]["mean"]) > 0}
    return [check(result | {"tokens": tokens}).as_dict() for check in CHECKS]


def early_and_late(result: dict) -> tuple[slice, slice, str, str]:
    """The layers (as indices from 0) of the first and of the last phase; of a single phase, thirds of the depth."""
    sizes = result["phase_sizes"]
    depth = sum(sizes)
    if len(sizes) > 1:
        return slice(0, sizes[0]), slice(depth - sizes[-1], depth), "first phase", "last phase"
    third = max(1, depth // 3)
    kind = "third" if third > 1 else "layer"
    return slice(0, third), slice(depth - third, depth), f"first {kind}", f"last {kind}"


def directional_convergence(result: dict) -> Claim:
    claim = Claim(
        "directional convergence",
        "Going through the layers, each token's direction draws ever nearer to the one it ends in.",
        "There are fewer than three layers, or all states are 0.",
    )
    if sum(result["phase_sizes"]) < 3:
        return claim
    least, beyond, said = THRESHOLDS["rank_correlation"], THRESHOLDS["beyond_orthogonal"], []
    for name, token in result["tokens"].items():
        cosine = token["convergence"]["mean"]
        # Tokens that never turn have no correlation: they draw nearer to nothing.
        correlation = float(spearmanr(range(len(cosine)), cosine).statistic) if np.ptp(cosine) > 1e-9 else 0.0
        middle = len(cosine) // 2
        # The cosine of a random walk rises too, by the lengths of its states alone.
        walk = token["orthogonal_convergence"]["mean"][middle]
        excess = cosine[middle] - walk
        what = (
            f"{name}: cosine to the last state at layer {middle} beyond that of orthogonal steps; the cosine's rank "
            f"correlation with depth is {correlation:.2f}"
        )
        asked = f"at least {beyond}, and a correlation of at least {least}"
        claim.parts.append(Part(what, excess, asked, excess >= beyond and correlation >= least))
        said.append(
            f"{name} from {cosine[0]:.2f} at the embeddings to {cosine[middle]:.2f} at layer {middle} (steps at right "
            f"angles would give {walk:.2f}) and {cosine[-2]:.2f} one layer before the last"
        )
    if said:
        claim.measured = f"The cosine to the last state goes, for {_list(said)}."
    return claim


def late_reorientation(result: dict) -> Claim:
    claim = Claim(
        "late cls reorientation",
        "The cls token turns sharply in late layers, while the patch tokens go on smoothly.",
        "The model has no cls token, or too few layers to tell late ones from middle ones.",
    )
    tokens, depth = result["tokens"], sum(result["phase_sizes"])
    if not {"cls", "patch"} <= set(tokens) or depth < 6:
        return claim
    first_late, first_middle = depth - depth // 3, depth // 3
    ratios, said = {}, []
    for name in ("cls", "patch"):
        speed = np.degrees(tokens[name]["angular_speed"]["mean"])
        typical = float(np.median(speed[first_middle:first_late]))
        if typical < 0.01:
            claim.measured = (
                f"The middle layers hardly turn {name}, by {typical:.2g}°: there is nothing to compare with."
            )
            return claim
        peak = first_late + int(speed[first_late:].argmax())
        ratios[name] = float(speed[peak]) / typical
        said.append(
            f"the fastest of the last {depth - first_late} layers turns {name} by {speed[peak]:.1f}° (layer "
            f"{peak + 1}), {ratios[name]:.2f} times the median of the middle layers, {typical:.1f}°"
        )
    least = THRESHOLDS["late_turn"]
    what = "cls: fastest late turn, in median turns of the middle layers"
    claim.parts.append(Part(what, ratios["cls"], f"at least {least}", ratios["cls"] >= least))
    excess = ratios["cls"] / max(ratios["patch"], 1e-9)
    over = THRESHOLDS["turn_over_patches"]
    sharp = ratios["cls"] >= least and excess >= over
    claim.parts.append(Part("that number over the patches' own", excess, f"at least {over}, of a sharp turn", sharp))
    what = "patches: fastest late turn, in median turns of the middle layers"
    smooth = ratios["cls"] >= least > ratios["patch"]
    claim.parts.append(Part(what, ratios["patch"], f"below {least}, beside a sharp turn of cls", smooth))
    claim.measured = _capital(_list(said)) + "."
    return claim


def patch_coherence(result: dict) -> Claim:
    claim = Claim(
        "patch coherence",
        "In late layers the patch tokens move together, along their mean, as in a mean field.",
        "An image has a single patch token, the model a single layer, or patches don't move.",
    )
    patch = result["tokens"].get("patch", {})
    if "coherence" not in patch or sum(result["phase_sizes"]) < 2 or not any(patch["coherence"]["mean"]):
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
        f"Patch coherence {_goes(before, after, early_name, late_name, '.2f')} (independent updates would give "
        f"{patch['isotropic_coherence']:.2f}); the cosine of patches to their mean direction goes from "
        f"{field_[0]:.2f} at the embeddings to {field_[-1]:.2f} at the last layer."
    )
    return claim


def low_rank_updates(result: dict) -> Claim:
    claim = Claim(
        "low-rank late updates",
        "Late updates live in few dimensions, about six.",
        "The model has a single layer, or its early or late layers leave patches as they are.",
    )
    early, late, early_name, late_name = early_and_late(result)
    patch = result["tokens"].get("patch")
    if patch is None or sum(result["phase_sizes"]) < 2:
        return claim
    before, after = (float(np.mean(patch["stable_rank"][span])) for span in (early, late))
    if not (before and after):
        return claim
    effective = [float(np.mean(patch["effective_rank"][span])) for span in (early, late)]
    most, fall = (
        min(THRESHOLDS["late_rank"], THRESHOLDS["share_of_rank"] * patch["largest_rank"]),
        THRESHOLDS["rank_fall"],
    )
    claim.parts = [
        Part(f"stable rank of patch updates, {late_name}", after, f"at most {most:g}", after <= most),
        Part(f"the same over that of the {early_name}", after / before, f"at most {fall}", after <= fall * before),
    ]
    claim.measured = (
        f"The stable rank of patch updates {_goes(before, after, early_name, late_name, '.1f')}; their effective rank "
        f"goes from {effective[0]:.0f} to {effective[1]:.0f}, of {patch['largest_rank']} possible."
    )
    return claim


def weak_contraction(result: dict) -> Claim:
    claim = Claim(
        "weak contraction",
        "The best linear map between consecutive states contracts weakly: its eigenvalues lie on the unit circle or "
        "just inside.",
        "All states are 0.",
    )
    most, least, said = THRESHOLDS["largest_modulus"], THRESHOLDS["median_modulus"], []
    share, ratio, unexplained, few = THRESHOLDS["explained"], THRESHOLDS["unexplained_ratio"], [], []
    for name, token in result["tokens"].items():
        depth = token["dmd"]["depth"]
        if not depth["moduli"]:
            continue
        largest, median = depth["moduli"][0], float(np.median(depth["moduli"]))
        modes, explained = len(depth["moduli"]), depth["explained"]
        # The moduli of a random walk, which one factor for all directions explains, mean nothing.
        factor = depth["by_one_factor"]
        if result["images"] < IMAGES_OF_A_MODE * modes:
            few.append(name)
        elif explained >= share and 1 - explained < ratio * (1 - factor):
            what = f"{name}: median modulus, all depth; the largest is {largest:.2f}"
            asked = f"at least {least}, and the largest at most {most}"
            claim.parts.append(Part(what, median, asked, median >= least and largest <= most))
        else:
            unexplained.append(name)
        said.append(
            f"{name} from {depth['moduli'][-1]:.2f} to {largest:.2f}, median {median:.2f} ({modes} modes, which hold "
            f"{_percent(depth['energy'])}; the map explains {_percent(explained)}, one factor for all directions "
            f"{_percent(factor)}; with the growth of norms the largest modulus is "
            f"{token['dmd_with_growth']['depth']['moduli'][0]:.2f})"
        )
    if said:
        claim.measured = f"Over all depth, the growth of norms divided out, moduli go for {_list(said)}."
    if unexplained:
        claim.measured += (
            f" For {' and '.join(unexplained)} the map explains too little, or too little more than one factor does, "
            "for its moduli to tell."
        )
    if few:
        claim.measured += f" {result['images']} images are too few for so many modes."
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
            total, low, high = (entry["total"][key] for key in ("mean", "low", "high"))
            if high is None:
                continue
            what = f"{name}: a push of {eps:g} at layer {entry['start']} is multiplied by the last layer by"
            met = None if low <= 1 <= high else high < 1
            asked = "below 1, with its 95 % band" + (f", which is {low:.2f} to {high:.2f}" if met is None else "")
            claim.parts.append(Part(what, total, asked, met))
        totals = ", ".join(f"{entry['total']['mean']:.2f} (from layer {entry['start']})" for entry in smallest)
        said.append(f"for {name} {totals}")
    if said:
        claim.measured = f"By the last layer a push of {eps:g} is multiplied by, {_list(said)}."
        if not claim.parts:
            claim.measured += " No more than one image was pushed, which has no confidence interval."
        if open_parts := sum(part.holds is None for part in claim.parts):
            claim.measured += f" {open_parts} of the {len(claim.parts)} bands include 1."
    return claim


def boundary_alignment(result: dict) -> Claim:
    claim = Claim(
        "jumps at phase boundaries",
        "Phases are phases of the dynamics too: where they meet, the speed at which tokens turn jumps.",
        "All states are 0.",
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
    if said:
        claim.measured = f"From layer to layer the angular speed changes, for {_list(said)}."
    if said and not claim.parts:
        claim.measured += f" So few layers allow no p value below {test['smallest_p_value']:.2g}."
    return claim


def angular_basins(result: dict) -> Claim:
    claim = Claim(
        "class-dependent basins",
        "Images of one class end in directions nearer to each other than to those of other classes.",
        "All states are 0.",
    )
    if not result["tokens"]:
        return claim
    name = next(iter(result["tokens"]))
    basins = result["tokens"][name]["basins"]
    if basins["within"] is None or basins["between"] is None:
        known = basins["classes"]
        claim.measured = (
            "There were no labels."
            if known is None
            else "The images are of one class only."
            if known == 1
            else "No two images are of one class."
        )
        return claim
    # At layer 0 the cls token is the same for all images.
    within, between = (np.degrees(np.arccos(np.clip(basins[key], -1, 1))) for key in ("within", "between"))
    first, last = (float(within[i] / max(between[i], 1e-9)) for i in (1, -1))
    most, fall = THRESHOLDS["basin_ratio"], THRESHOLDS["basin_fall"]
    enough = basins["images"] >= IMAGES_OF_A_CLASS * basins["classes"]
    claim.parts = [
        Part(
            f"{name}: angle within over between classes, last layer",
            last,
            f"at most {most}",
            last <= most if enough else None,
        ),
        Part(
            "the same over that of layer 1",
            last / max(first, 1e-9),
            f"at most {fall}",
            last <= fall * first if enough else None,
        ),
    ]
    claim.measured = (
        f"At the last layer the mean cosine of two images, as an angle of their {name} directions, is "
        f"{within[-1]:.1f}° within and {between[-1]:.1f}° between the {basins['classes']} classes; at layer 1 it is "
        f"{within[1]:.1f}° and {between[1]:.1f}°."
    )
    if not enough:
        claim.measured += f" Of {basins['images']} images chance alone can make such classes."
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


def _goes(before: float, after: float, early: str, late: str, digits: str) -> str:
    if abs(after - before) <= CHANGE * max(abs(before), abs(after)):
        return f"hardly changes, {before:{digits}} in the {early} and {after:{digits}} in the {late}"
    verb = "rises" if after > before else "falls"
    return f"{verb} from {before:{digits}} in the {early} to {after:{digits}} in the {late}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
