"""The running mean against the definition."""

import torch

from coterie.aggregation import RunningMean


def test_each_name_is_averaged_over_those_who_hold_it() -> None:
    uploads = [
        {"all": torch.randn(3, 4), "some": torch.randn(2)},
        {"all": torch.randn(3, 4)},
        {"all": torch.randn(3, 4), "some": torch.randn(2)},
    ]
    mean = RunningMean()
    kept = [{name: tensor.clone() for name, tensor in upload.items()} for upload in uploads]
    for upload in uploads:
        mean.add(upload)
    for name in ("all", "some"):
        held = [upload[name].double() for upload in uploads if name in upload]
        expected = torch.stack(held).mean(0)
        assert torch.allclose(mean.result()[name].double(), expected, atol=1e-7)
    for upload, before in zip(uploads, kept, strict=True):  # nothing that arrived is changed
        assert all(torch.equal(upload[name], before[name]) for name in upload)


def test_weights() -> None:
    uploads, weights = torch.randn(4, 5, 3), [0.5, 2.0, 0.0, 1e-3]
    mean = RunningMean()
    for upload, weight in zip(uploads, weights, strict=True):
        mean.add({"w": upload}, weight)
    parts = [weight / sum(weights) * u for u, weight in zip(uploads, weights, strict=True)]
    assert torch.allclose(mean.result()["w"], torch.stack(parts).sum(0), atol=1e-6)


def test_no_uploads_no_means() -> None:
    assert RunningMean().result() == {}
