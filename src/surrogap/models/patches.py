"""Patches of images as rows of a matrix."""

from torch import Tensor, nn


class Patches(nn.Module):
    """A convolution whose kernel is as large as its stride, as a product of matrices.

    It computes the same to rounding, and its weights have the same names and shapes. In profiles,
    cuDNN was slow at such convolutions of three channels in bfloat16.

    Args:
        convolution: Whose weights it takes over: square kernels, a stride of their size, and
            neither padding, dilation nor groups.
    """

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images: Tensor) -> Tensor:
        """From `(N, C, H, W)` to `(N, D, H / side, W / side)`."""
        side = self.weight.shape[-1]
        number, channels, height, width = images.shape
        grid = images.reshape(number, channels, height // side, side, width // side, side)
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return nn.functional.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
