"""The three wide dense layers that AlexNet, CaffeNet and VGG end with.

>>> wide_classifier(256, (13, 9), largest=6, classes=1000, dropout=0.5)[0]
AdaptiveAvgPool2d(output_size=(6, 6))
"""

from torch import nn

from deepex.nets.geometry import Size

_WIDTH = 4096


def wide_classifier(channels: int, grid: Size, *, largest: int, classes: int, dropout: float) -> nn.Sequential:
    """Return 4096-4096-classes on feature maps with the extents `grid`.

    Where a map exceeds `largest` points on an axis, average pooling brings it down to that. At the published image
    size nothing is pooled and the published parameter count holds. Smaller images get a first dense layer for the map
    they have, instead of repeating its points to fill the published one.
    """
    height, width = (min(extent, largest) for extent in grid)
    # Left out where it would do nothing: its backward pass on CUDA is not deterministic.
    pooling = nn.Identity() if (height, width) == grid else nn.AdaptiveAvgPool2d((height, width))
    return nn.Sequential(
        pooling,
        nn.Flatten(),
        *(nn.Linear(channels * height * width, _WIDTH), nn.ReLU(inplace=True), nn.Dropout(dropout)),
        *(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(inplace=True), nn.Dropout(dropout)),
        nn.Linear(_WIDTH, classes),
    )
