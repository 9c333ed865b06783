"""The test device refuses what a GPU refuses, and counts what makes a GPU wait."""

import pytest
import torch
from device import NAME
from placed import counting, using
from torch.nn import functional as F


def on(index: int, *shape: int) -> torch.Tensor:
    return torch.ones(shape).to(torch.device(NAME, index))


@pytest.mark.usefixtures("gpu")
class TestTheDevice:
    @pytest.mark.parametrize(
        ("use", "why"),
        [
            (lambda x: x + torch.ones(3), "same device"),
            (lambda x: x + on(1, 3), "same device"),
            (lambda x: x.normal_(generator=torch.Generator()), "generator"),
            (lambda x: x.numpy(), "numpy"),
        ],
    )
    def test_what_a_gpu_refuses_is_refused(self, use, why) -> None:
        with pytest.raises((RuntimeError, TypeError), match=why):
            use(on(0, 3))

    def test_a_scalar_and_an_index_may_be_on_the_cpu(self) -> None:
        assert (on(0, 3) + torch.ones(()))[torch.tensor([0, 2])].tolist() == [2, 2]

    def test_gradients_pass_from_device_to_device(self) -> None:
        x = on(1, 3).requires_grad_()
        y = (2 * x).to(torch.device(NAME, 0))
        (y * on(0, 3)).sum().backward()
        assert y.device.index == 0
        assert x.grad is not None
        assert x.grad.device.index == 1
        assert x.grad.tolist() == [2, 2, 2]

    def test_tensors_that_pytorch_creates_belong_to_the_operation(self) -> None:
        q = on(1, 1, 1, 4, 4).requires_grad_()
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad is not None
        assert q.grad.device.index == 1

    @pytest.mark.parametrize(
        ("read", "count"),
        [
            (lambda x: x.sum().item(), 1),
            (lambda x: x.tolist(), 1),
            (lambda x: x.cpu(), 1),
            (lambda x: x[x > 0], 1),
            (lambda x: x.nonzero(), 1),
            (lambda x: torch.equal(x, x), 1),
            (lambda x: torch.zeros(3).copy_(x), 1),
            (lambda x: x.to("cpu", non_blocking=True), 0),
            (lambda x: x.softmax(0).clone(), 0),
            (lambda x: x[torch.tensor([0])], 0),
        ],
    )
    def test_reads_are_counted(self, read, count) -> None:
        x = on(0, 3)
        with counting() as counts:
            read(x)
        assert counts.reads.total() == count

    def test_copies_that_block_are_counted(self) -> None:
        x, place = torch.ones(3), torch.device(NAME)
        with counting() as counts:
            x.pin_memory().to(place, non_blocking=True)
            assert not counts.writes.total()
            x.to(place)
            x.to(place, non_blocking=True)  # without pinned memory, the host waits anyway
        assert counts.writes.total() == 2

    def test_autocast_computes_products_in_bf16(self) -> None:
        with torch.autocast(NAME, torch.bfloat16):
            assert F.linear(on(0, 2, 3), on(0, 4, 3)).dtype == torch.bfloat16


def test_a_device_without_float64_refuses_it(monkeypatch) -> None:
    with using(monkeypatch, float64=False), pytest.raises(TypeError, match="float64"):
        on(0, 3).double()
