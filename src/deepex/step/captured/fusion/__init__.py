"""Find in a user's network what can be computed together, and compute it so; the network itself stays as it is.

    fused = fuse(network, means)
    output = fused(images)
    fused.found            # {"batch norm + ReLU": 32, "batch norm + add + ReLU": 16, …}

The network's forward pass is traced into a graph of its modules (trace.py), in which chains that our kernels know are replaced
(rules below) by modules that call them (parts.py). Where the trace fails, the network runs as it is.
"""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional

from deepex.step.captured.fusion import kinds, parts
from deepex.step.captured.fusion.parts import FusionContext
from deepex.step.captured.fusion.trace import IN_PLACE, calls, has_hooks, trace

_RELU = (functional.relu, torch.relu, torch.relu_, "relu", "relu_")
_ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
_CAT = (torch.cat, torch.concat, torch.concatenate)
_NEW = (operator.add, torch.add, "add", operator.sub, torch.sub, "sub", operator.mul, torch.mul, "mul", torch.relu, "relu", *_CAT)


class Fused:
    """A network's forward pass in training, in fewer kernels.

    `found` counts what was put together. `fold`: side of the squares, border and kernel of the folded images that it takes; zeros
    for plain ones. `counters`: of the batch norms' batches; a step adds `calls`, of which a norm that stands in two places has two.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor], Any],
        found: Counter[str],
        norms: list[nn.BatchNorm2d],
        fold: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self._run, self.found, self.fold = run, found, fold
        counters = {id(norm): norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None}
        self.counters = list(counters.values())
        self.calls = [sum(id(norm) == one for norm in norms) for one in counters]  # of each one's norm, in a step

    def __call__(self, images: torch.Tensor) -> Any:
        """The output for a batch."""
        return self._run(images)


def fuse(network: nn.Module, context: FusionContext) -> Fused:
    """Trace `network` and replace what is known."""
    graph = trace(network)
    if graph is None:
        return Fused(network, Counter({"none: the network cannot be traced": 1}), [])
    return _Work(network, graph, context).done()


class _Work:
    """The graph while it is rewritten, rule by rule."""

    def __init__(self, network: nn.Module, graph: fx.Graph, context: FusionContext) -> None:
        self._graph, self._context = graph, context
        self._module = fx.GraphModule(network, graph)
        self._modules = dict(network.named_modules())
        called = [self._modules[str(node.target)] for node in graph.nodes if node.op == "call_module"]
        self._uses = Counter(id(getattr(module, "weight", None)) for module in called)
        self._found: Counter[str] = Counter()
        self._norms: list[nn.BatchNorm2d] = []
        self._fold = (0, 0, 0)

    def done(self) -> Fused:
        """Apply the rules; longer chains come first."""
        self._additions()
        for rule in (self._norm_chain, self._product_chain, self._flat_chain, self._single):
            for node in list(self._graph.nodes):
                if node.op == "call_module" and node.graph is self._graph and not node._erased:
                    rule(node)
        self._noises()
        self._concatenations()
        self._forks()
        self._own()
        self._graph.lint()
        self._module.recompile()
        return Fused(self._module, self._found, self._norms, self._fold)

    def _additions(self) -> None:
        """norm(y) + other, activated or not."""
        for node in list(self._graph.nodes):
            if not calls(node, _ADD) or len(node.args) != 2 or node.kwargs:
                continue
            sides = [side for side in node.args if isinstance(side, fx.Node)]
            normed = [side for side in sides if self._norm(side) is not None and len(side.users) == 1]
            if len(set(sides)) != 2 or not normed:
                continue
            first = normed[-1]
            other = sides[0] if sides[1] is first else sides[1]
            norm, other_norm = self._norm(first), self._norm(other) if other in normed else None
            changed = calls(node, (operator.iadd, "add_")) and len(sides[0].users) > 1  # others see the sum in its place
            if changed or other_norm is norm:  # one norm's running averages cannot move twice at once
                continue
            last, relu = self._activated(node)
            inputs = (first.args[0], other.args[0] if other_norm is not None else other)
            with self._graph.inserting_before(node):  # where its inputs are still what they were
                pair = self._call(parts.Joined(norm, other_norm, relu=relu), inputs)
                z, again = (self._graph.call_function(operator.getitem, (pair, k)) for k in range(2))
            self._norms += [n for n in (norm, other_norm) if n is not None]
            users = list(last.users)
            last.replace_all_uses_with(z)
            if len(users) > 1 and not any(_changes(user, self._plain(user)) for user in users):
                users[-1].replace_input_with(z, again)
            self._found["batch norm + add" + " + ReLU" * relu] += 1
            self._drop(last, node, first, *([other] if other_norm is not None else []))

    def _norm_chain(self, node: fx.Node) -> None:
        """norm(y), activated or not, pooled or not."""
        norm = self._norm(node)
        if norm is None:
            return
        self._norms.append(norm)
        last, relu = self._activated(node)
        pool = self._next(last, nn.MaxPool2d) if relu else None
        if pool is not None and kinds.can_pool(self._modules[str(pool.target)]):
            self._replace(
                "batch norm + ReLU + max pooling", parts.NormedPool(norm, self._modules[str(pool.target)]), node, last, pool
            )
        else:
            self._replace("batch norm" + " + ReLU" * relu, parts.Normed(norm, relu=relu), *dict.fromkeys((node, last)))

    def _product_chain(self, node: fx.Node) -> None:
        """Convolutions, with their bias, ReLU and pooling."""
        module = self._plain(node)
        if type(module) not in (nn.Conv2d, nn.ConvTranspose2d) or module.padding_mode != "zeros" or isinstance(module.padding, str):
            return
        first = isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder" and len(node.args[0].users) == 1
        thin = first and kinds.can_be_thin_input(module) and not self._is_shared(module)
        last, relu = self._activated(node)
        pool = self._next(last, nn.MaxPool2d)
        name = type(module).__name__
        if first and kinds.can_fold(module) and self._context.folds:
            self._fold = (module.stride[0], module.padding[0], module.kernel_size[0])
            made: nn.Module = parts.Convolution(module, self._context, relu=relu, folds=True)
            name = "folded " + name
        elif pool is not None and type(module) is nn.Conv2d and kinds.can_pool(self._modules[str(pool.target)]):
            made = parts.PooledConvolution(module, self._modules[str(pool.target)], self._context, relu=relu, thin=thin)
            self._replace("thin " * thin + name + " + ReLU" * relu + " + max pooling", made, *dict.fromkeys((node, last, pool)))
            return
        elif thin:
            made, name = parts.ThinInput(module, self._context, relu=relu), "thin " + name
        elif kinds.can_be_thin_output(module) and not relu and not self._is_shared(module):
            made, name = parts.ThinOutput(module, self._context), "thin " + name
        else:
            made = parts.Convolution(module, self._context, relu=relu)
        self._replace(name + " + ReLU" * relu, made, *dict.fromkeys((node, last)))

    def _flat_chain(self, node: fx.Node) -> None:
        """Dense layers, with the flattening before or the unflattening behind, and a ReLU."""
        module = self._plain(node)
        if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            behind = self._next(node, nn.Linear)
            if behind is not None:
                last, relu = self._activated(behind)
                dense = self._modules[str(behind.target)]
                made: nn.Module = parts.FlatDense(dense, self._context, relu=relu, room=self._room(dense))
                self._replace("flattening + dense" + " + ReLU" * relu, made, *dict.fromkeys((node, behind, last)))
        elif type(module) is nn.Linear:
            shaped = self._next(node, nn.Unflatten)
            last, relu = self._activated(node if shaped is None else shaped)
            if shaped is not None and self._modules[str(shaped.target)].dim == 1:
                shape = self._modules[str(shaped.target)].unflattened_size
                made = parts.DenseMaps(module, shape, self._context, relu=relu, room=self._room(module))
                self._replace("dense + unflattening" + " + ReLU" * relu, made, *dict.fromkeys((node, shaped, last)))
            else:
                last, relu = self._activated(node)
                made = parts.Dense(module, self._context, relu=relu)
                self._replace("dense" + " + ReLU" * relu, made, *dict.fromkeys((node, last)))

    def _single(self, node: fx.Node) -> None:
        """What stands alone."""
        module = self._plain(node)
        if type(module) is nn.MaxPool2d and kinds.can_pool(module):
            self._replace("max pooling", parts.Pool(module), node)
        elif kinds.is_mean(module):
            self._replace("average pooling", parts.MapMean(), node)
        elif type(module) is nn.Dropout and module.training and module.p > 0:
            self._replace("dropout", parts.Dropped(module, self._context, self._salt()), node)
        elif kinds.is_response(module):
            self._replace("local response", parts.Response(module), node)

    def _noises(self) -> None:
        """torch.randn_like of whatever."""
        for node in list(self._graph.nodes):
            if calls(node, (torch.randn_like,)) and len(node.args) == 1 and not node.kwargs:
                self._replace("noise", parts.Noise(self._context, self._salt()), node)

    def _salt(self) -> int:
        """Of what draws random numbers next; 0 belongs to crops and flips."""
        return 1 + self._found["dropout"] + self._found["noise"]

    def _concatenations(self) -> None:
        """torch.cat along the second dimension, that of maps' channels."""
        for node in list(self._graph.nodes):
            if not calls(node, _CAT) or not node.args or not isinstance(node.args[0], list | tuple):
                continue
            dims = [*node.args[1:], *node.kwargs.values()]
            if dims != [1] or not all(isinstance(part, fx.Node) for part in node.args[0]):
                continue
            with self._graph.inserting_before(node):
                node.replace_all_uses_with(self._call(parts.Concatenated(), (node.args[0],)))
            self._found["concatenation"] += 1
            self._drop(node)

    def _forks(self) -> None:
        """Maps with several users. Only where all of them are known to leave it as it is: a fork hides changes from autograd."""
        maps: set[fx.Node] = set()
        for node in list(self._graph.nodes):
            users = list(node.users)
            if not self._is_map(node, maps):
                continue
            maps.add(node)
            if len(users) < 2 or calls(node, (operator.getitem,)) or not all(self._only_reads(user) for user in users):
                continue
            with self._graph.inserting_after(node):
                forked = place = self._call(parts.Forked(len(users)), (node,))
            for k, user in enumerate(users):
                with self._graph.inserting_after(place):
                    place = self._graph.call_function(operator.getitem, (forked, k))
                maps.add(place)
                user.replace_input_with(node, place)
            self._found["fork"] += 1

    def _own(self) -> None:
        """Tell modules what is theirs alone, so that they may write there."""
        for node in self._graph.nodes:
            module = self._made(node)
            if isinstance(module, parts.Normed):
                module.owned = self._is_left(node, 0)
            elif isinstance(module, parts.Joined):
                first = next(user for user in node.users if user.args[1] == 0)
                module.owned = (self._is_left(node, 0), self._is_left(node, 1), self._gets_new_gradient(first))
            elif isinstance(module, parts.Convolution | parts.DenseMaps):
                module.owned = self._gets_new_gradient(node)
            elif isinstance(module, parts.ThinOutput) and isinstance(node.args[0], fx.Node) and len(node.args[0].users) == 1:
                before = self._made(node.args[0])
                if isinstance(before, parts.Convolution) and before.can_be_masked():
                    before.masked, module.before = True, (before,)
            if parts.makes_smaller(module):
                module.remakes = isinstance(self._made(node.args[0]), parts.Normed) and len(node.args[0].users) == 1

    def _gets_new_gradient(self, node: fx.Node) -> bool:
        """Whether the gradient of what a node makes comes from one user, and is nobody else's."""
        return len(node.users) == 1 and parts.makes_new_gradient(self._made(next(iter(node.users))))

    def _is_left(self, node: fx.Node, place: int) -> bool:
        """Whether an input of a node is used there alone, and not needed by what made it."""
        source = node.args[place]
        if not isinstance(source, fx.Node) or len(source.users) != 1 or node.args.count(source) != 1:
            return False
        return parts.leaves_output(self._made(source))

    def _is_map(self, node: fx.Node, maps: set[fx.Node]) -> bool:
        """Whether a node makes a map in memory of its own, or is one of the pair that a Joined gives."""
        if calls(node, (operator.getitem,)):
            return any(type(self._made(source)) is parts.Joined for source in node.all_input_nodes)
        return parts.makes_maps(self._made(node)) or (_is_new(node) and not maps.isdisjoint(node.all_input_nodes))

    def _only_reads(self, node: fx.Node) -> bool:
        return parts.only_reads(self._made(node)) or _is_new(node)

    def _made(self, node: fx.Node) -> Any:
        """The module that a node calls: ours, or one to which nobody listens."""
        ours = node.op == "call_module" and node.target not in self._modules
        return self._module.get_submodule(str(node.target)) if ours else self._plain(node)

    def _norm(self, node: fx.Node) -> nn.BatchNorm2d | None:
        """The batch norm that a node calls, if the kernels can do it."""
        module = self._plain(node)
        if type(module) is not nn.BatchNorm2d or module.momentum is None or not module.training:
            return None
        return None if module.weight is None or module.bias is None else module

    def _is_shared(self, module: nn.Module) -> bool:
        """Whether its weight is used elsewhere, too: its gradient comes through the lane or through autograd, not through both."""
        return self._uses[id(module.weight)] > 1

    def _room(self, module: nn.Module) -> torch.Tensor | None:
        """Memory for a module's weight in another order. There is one for each weight, so none where it may be turned twice."""
        return None if self._is_shared(module) else self._context.room(cast("nn.Parameter", module.weight))

    def _activated(self, node: fx.Node) -> tuple[fx.Node, bool]:
        """The node's ReLU if that is all that uses it, and whether there is one."""
        if len(node.users) == 1:
            (user,) = node.users
            if calls(user, _RELU) or type(self._plain(user)) is nn.ReLU:
                return user, True
        return node, False

    def _next(self, node: fx.Node, kind: type[nn.Module]) -> fx.Node | None:
        """What uses the node, if that is one module of this kind and nothing else."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        return user if user is not None and type(self._plain(user)) is kind else None

    def _plain(self, node: fx.Node) -> Any:
        """The module that a node calls with one input, if nobody listens to it."""
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        module = self._modules.get(str(node.target))
        return None if module is None or has_hooks(module) else module

    def _replace(self, name: str, made: nn.Module, *chain: fx.Node) -> None:
        """Put one module in the place of a chain of nodes."""
        with self._graph.inserting_before(chain[0]):  # where its input is still what it was
            chain[-1].replace_all_uses_with(self._call(made, chain[0].args))
        self._found[name] += 1
        self._drop(*reversed(chain))

    def _call(self, module: nn.Module, inputs: Any) -> fx.Node:
        name = f"fused{len(self._module._modules)}"
        self._module.add_submodule(name, module)
        return self._graph.call_module(name, inputs)

    def _drop(self, *nodes: fx.Node) -> None:
        for node in dict.fromkeys(nodes):
            self._graph.erase_node(node)


def _changes(node: fx.Node, module: Any) -> bool:
    """Whether a node may change its input in place."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    by_name = node.op != "call_module" and (name.endswith("_") or node.target in IN_PLACE)
    return by_name or bool(node.kwargs.get("inplace")) or bool(getattr(module, "inplace", False))


def _is_new(node: fx.Node) -> bool:
    """Whether a node calls a function that leaves its inputs as they are and gives something in new memory."""
    return calls(node, _NEW) and "out" not in node.kwargs
