"""Adapters: the trained modules attached to a frozen base, such as LoRA, experts and routers."""

from coterie.adapters.adapter import Adapter as Adapter
from coterie.adapters.adapter import Trainable as Trainable
from coterie.adapters.adapter import attached as attached
from coterie.adapters.adapter import detach as detach
from coterie.adapters.adapter import first_experts as first_experts
from coterie.adapters.amole import AmoleAdapter as AmoleAdapter
from coterie.adapters.amole import AmoleLayout as AmoleLayout
from coterie.adapters.detaching import detached as detached
from coterie.adapters.layout import Layout as Layout
from coterie.adapters.lease import LeaseAdapter as LeaseAdapter
from coterie.adapters.lora import LoraLinear as LoraLinear
from coterie.adapters.merging import fix_factors as fix_factors
from coterie.adapters.merging import merge as merge
from coterie.adapters.merging import mergeable as mergeable
from coterie.adapters.mixture import Mixture as Mixture
from coterie.adapters.parameter import Parameter as Parameter
from coterie.adapters.parameter import Selects as Selects
from coterie.adapters.parameter import of_roles as of_roles
from coterie.adapters.parameter import pairs_of as pairs_of
from coterie.adapters.parameter import trained as trained
from coterie.adapters.roles import ROLES as ROLES
from coterie.adapters.roles import Role as Role
from coterie.adapters.routed import expert_roles as expert_roles
from coterie.adapters.routed import role_weights as role_weights
