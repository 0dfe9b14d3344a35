"""What a run is judged by, as data: records, targets and reports know no measure by name.

error = Measure(name="error", unit="%")
error.value(25.0, samples=100)      # 0.25, from the sum over samples
error.text(0.25)                    # "25 %"
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that a person reads, kept as a sum that adds up over ranks.

    `form`: its value is the `mean` over the samples, or the `root` of that. `better`: which values are. `unit`: `%` for a share,
    which is shown in per cent. `label`: its name in sentences. `least`: what it is never below, if there is such a value.
    """

    name: str
    form: Literal["mean", "root"] = "mean"
    better: Literal["lower", "higher"] = "lower"
    unit: str = ""
    label: str = ""
    least: float | None = 0.0

    @property
    def title(self) -> str:
        """Its name in sentences."""
        return self.label or self.name

    @property
    def is_share(self) -> bool:
        """Whether it is shown in per cent."""
        return self.unit == "%"

    def value(self, total: float, samples: int) -> float:
        """The measure, from the sum over so many samples."""
        return math.sqrt(total / samples) if self.form == "root" else total / samples

    def best(self, values: Sequence[float]) -> float:
        """The best of some values."""
        return max(values) if self.better == "higher" else min(values)

    def text(self, value: float, digits: int = 4) -> str:
        """A value in a table, with its unit."""
        if self.is_share:
            return f"{value:.{digits - 2}%}"
        return f"{value:.{digits}f}{' ' * bool(self.unit)}{self.unit}"


LOSS: Final = Measure(name="loss", least=None)
EARLIER: Final = {  # of records that were written before runs said what they measure
    "error": Measure(name="error", unit="%"),
    "rmse": Measure(name="rmse", form="root", label="RMSE"),
}
