"""`weights`, local SGD: the mean of the replicas' weights, every period (Stich 2019).

For users: docs/synchronisation.md#weights
"""

from typing import Any, Final

from typing_extensions import override

from deepex.sync.agreement import Agreement
from deepex.sync.how.strategy import AgreementInputs, Strategy


class Weights(Strategy):
    """The plain mean."""

    name = "weights"
    makes_equal = codable = leaves_out = True

    @override
    def agree(self, config: Any, inputs: AgreementInputs) -> Agreement:
        return inputs.mean()


KIND: Final = Weights
