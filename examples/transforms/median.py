"""The coordinate-wise median (Yin et al., arXiv 1803.01498, definition 1) in place of the mean.

Up to half of the clients can send anything, and every number of the result still lies between
numbers that other clients sent. Memory grows with the number of clients.
"""

from typing import ClassVar

import torch

from coterie.aggregation.transform import Reduction


class Median(Reduction):
    name: ClassVar[str] = "my_median"
    summary: ClassVar[str] = "coordinate-wise median of uploads"
    least: ClassVar[int] = 3

    def reduce(self, contributions, memory):
        uploads = list(contributions)
        medians = {}
        for group in {g: None for upload in uploads for g in upload.groups}:
            names = {n: None for upload in uploads for n in upload.groups.get(group, {})}
            medians[group] = {
                name: torch.stack(
                    [u.groups[group][name].double() for u in uploads if name in u.groups[group]]
                )
                .quantile(0.5, dim=0)
                .float()
                for name in names
            }
        return medians
