"""Names that domains add to the package ``divergence``, for type checkers and editors.

At runtime each domain names its own (``Domain.public``), and nothing imports this file.
"""

from divergence.domains.doctor.doctor import doctor
from divergence.domains.doctor.result import Checkup
from divergence.domains.importing.importing import import_dump
from divergence.domains.logprobs.options import ServerOptions
from divergence.domains.probe.api import probe
from divergence.domains.quantization.quantize import quantize
from divergence.domains.quantization.result import Quantization
from divergence.domains.scores.result import ScoresReport
from divergence.domains.scores.scores import scores
from divergence.domains.tokenizers.compare import compare_tokens
from divergence.domains.tokenizers.result import TokensReport
from divergence.domains.training.judging import compare_losses
from divergence.domains.training.options import TrainOptions
from divergence.domains.training.result import LossReport
from divergence.domains.weights.compare import compare_weights
from divergence.domains.weights.result import WeightsReport

__all__ = [
    "Checkup",
    "LossReport",
    "Quantization",
    "ScoresReport",
    "ServerOptions",
    "TokensReport",
    "TrainOptions",
    "WeightsReport",
    "compare_losses",
    "compare_tokens",
    "compare_weights",
    "doctor",
    "import_dump",
    "probe",
    "quantize",
    "scores",
]
