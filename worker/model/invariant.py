"""Linear layers whose rows do not depend on the batch, for `--deterministic` on a GPU."""

from importlib import import_module

from torch import Tensor

from worker.model.layers import Linear, LinearWeights, Placement, TorchLinear, torch_linear


class InvariantLinear:
    """See worker.model.layers.Linear: the product of kernels/invariant_matmul.py."""

    def __init__(self, dense: TorchLinear) -> None:
        self.weight, self.bias = dense.weight, dense.bias
        self.out_features, self.in_features = dense.out_features, dense.in_features
        self._matmul = import_module("kernels.invariant_matmul").invariant_matmul  # Triton: on Linux only

    def __call__(self, x: Tensor) -> Tensor:
        """The product; a row has the same bits in any batch."""
        product: Tensor = self._matmul(x, self.weight, self.bias)
        return product


def invariant_linear(weights: LinearWeights, placement: Placement) -> Linear:
    """A factory for load_model."""
    dense = torch_linear(weights, placement)
    assert isinstance(dense, TorchLinear), type(dense).__name__
    return InvariantLinear(dense)
