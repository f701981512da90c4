"""Depth as a dynamical system: measures of trajectories through depth (arXiv 2512.19941)."""

from .basins import AngularBasins, image_directions
from .boundaries import boundary_jumps
from .coherence import mean_field_alignment, update_coherence, update_directions
from .direction import angle, angular_speed, convergence, norms, orthogonal_convergence
from .dmd import LinearMap, dmd, dmd_of_depth
from .model_dynamics import ModelDynamics
from .moments import Moments, SecondMoments
from .perturbation import SelfCorrection, deviation, perturb
from .rank import effective_rank, stable_rank, update_singular_values
from .recurrence import Recurrence, classify_orbit, iterate, step_sizes
from .run_on import RecordedLayers
from .trajectory_dynamics import TrajectoryDynamics

__all__ = [
    "AngularBasins",
    "LinearMap",
    "ModelDynamics",
    "Moments",
    "RecordedLayers",
    "Recurrence",
    "SecondMoments",
    "SelfCorrection",
    "TrajectoryDynamics",
    "angle",
    "angular_speed",
    "boundary_jumps",
    "classify_orbit",
    "convergence",
    "deviation",
    "dmd",
    "dmd_of_depth",
    "effective_rank",
    "image_directions",
    "iterate",
    "mean_field_alignment",
    "norms",
    "orthogonal_convergence",
    "perturb",
    "stable_rank",
    "step_sizes",
    "update_coherence",
    "update_directions",
    "update_singular_values",
]
