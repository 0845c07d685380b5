"""The devices that a test is for: this one, and a card where there is one."""

import pytest
import torch

CARD = torch.device("cuda", 0)

DEVICES = [pytest.param(torch.device("cpu"), id="cpu"), pytest.param(CARD, id="card", marks=pytest.mark.gpu)]
