"""Patch embedding as a matrix product."""

from torch import Tensor, nn


class Patches(nn.Module):
    """A convolution whose kernel size is its stride, computed as a matrix product.

    The result is the same up to rounding, and the weights have the same names and shapes. In
    profiles, cuDNN was slow at such convolutions with three channels in bfloat16.

    Args:
        convolution: The convolution whose weights are used. Its kernel is square, its stride is the
            kernel size, and it has no padding, dilation or groups.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images: Tensor) -> Tensor:
        """Map `(N, C, H, W)` to `(N, D, H / side, W / side)`."""
        side = self.weight.shape[-1]
        number, channels, height, width = images.shape
        grid = images.reshape(number, channels, height // side, side, width // side, side)
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return nn.functional.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
