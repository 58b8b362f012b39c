"""Random attention-like programs as source text, right and subtly wrong, out of a stream of small choices.

A program is lines of plain torch over a few inputs.  All randomness is a sequence of integers drawn from a `Chooser`:
a seed, hypothesis or a recorded list may stand behind it, and smaller integers always give simpler programs, so that
any shrinker minimises a program by making its integers smaller.  Nothing promises that a program runs: many wrong ones
are only legal because sizes agree, which is why half of all programs give every dimension the same size.
"""
from __future__ import annotations

from dataclasses import dataclass

from fuzz_choices import Chooser

INF = 'float("-inf")'
DYNAMIC = frozenset("bqkn")


@dataclass(frozen=True)
class Input:
    """``kind``: float (``grad`` or not), keep and hole (bool; hole has a row without true), int, length, additive."""

    name: str
    letters: str
    kind: str
    grad: bool


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    sizes: dict[str, int]
    lines: tuple[str, ...]
    loose: bool
    """Rounds in its own code even on float64 inputs: a float32 cast, or a number near 1e9 added to scores."""

    def source(self, name: str = "program") -> str:
        return "\n    ".join([f"def {name}({', '.join(i.name for i in self.inputs)}):", *self.lines]) + "\n"


class Builder:
    """Writes one program."""

    def __init__(self, choose: Chooser, dynamic: bool = False) -> None:
        """A dynamic program has a batch and lengths that no other size equals: the compiler takes equal sizes for one
        symbol, and all programs of one compiled function shall share three symbols."""
        self.c = choose
        self.dynamic = dynamic
        self.lines: list[str] = []
        self.inputs: list[Input] = []
        self.extra: list[str] = []
        self.loose = False
        self.axes = "bhqk"

    def add(self, *lines: str) -> None:
        self.lines += lines

    def new(self, letters: str, kind: str, grad: bool = False, name: str = "") -> str:
        name = name or f"x{len(self.inputs)}"
        self.inputs.append(Input(name, letters, kind, grad))
        return name

    def number(self) -> str:
        return self.c.pick(["0.5", "0.3", "1.7", "-0.4", "2.0", "1.0", "-1.0", "0.0", "(q.shape[-1] ** -0.5)"])

    # -- inputs ------------------------------------------------------------------------------------------------------

    def build(self) -> Program:
        c = self.c
        if self.dynamic:
            b, q, h, d = 3, 5, c.pick([2, 4, 1]), c.pick([4, 2])
            k, e, g = c.pick([q, 7]), d, c.pick([x for x in (h, 2, 1) if h % x == 0])
        elif c.chance(50):
            n = c.pick([2, 4])
            b = h = g = q = k = d = e = n
        else:
            b, h, q = c.pick([2, 1, 3]), c.pick([2, 4, 1]), c.pick([3, 5, 1, 4])
            k, d = c.pick([q, 6, 4, 7, 1]), c.pick([4, 2])
            e = c.pick([d, d, d, 6])
            g = c.pick([x for x in (h, 2, 1) if h % x == 0])
        self.h, self.g, self.d, self.e = h, g, d, e
        self.sizes = dict(b=b, h=h, g=g, r=h // g, q=q, k=k, d=d, e=e, n=b * h, C=h * d, G=g * d, E=g * e, **{
            "1": 1, "3": 3, "2": 2})
        self.same = q == k and h == g and d == e
        self.operands()
        if c.chance(7):
            self.sdpa()
        else:
            self.written()
        return Program(tuple(self.inputs), self.sizes, tuple(self.lines), self.loose)

    def operands(self) -> None:
        c = self.c
        if self.same and c.chance(8):
            x = self.new("bq3hd", "float", True)
            self.add(f"q, k, v = {x}.permute(2, 0, 3, 1, 4)" + c.pick(["", ".unbind(0)"]))
        else:
            self.operand("q", "h", "q", "d", "C")
            if self.same and c.chance(4):
                self.add("k = q")
            else:
                self.operand("k", "g", "k", "d", "G")
            if self.d == self.e and c.chance(6):
                self.add("v = k")
            else:
                self.operand("v", "g", "k", "e", "E")
        for x in "qkv":
            if c.chance(12):
                self.add(f"{x} = " + c.pick([
                    f"{x} * {self.number()}", f"{x} / 2.0", f"F.normalize({x}, dim=-1)", f"{x}.contiguous()",
                    f"{x}.clone()", f"{x} + 1.0", f"torch.cat([-{x}[..., 1:], {x}[..., :1]], -1)", f"{x}.relu()"]))
            if c.chance(2):
                self.add(f"{x} = {x}" + c.pick([".transpose(0, 1)", ".transpose(1, 2)", ".transpose(-1, -2)",
                                                ".flip(2)", ".roll(1, 2)", ".transpose(1, 2).reshape(x.shape)".replace(
                                                    "x.shape", f"{x}.shape"), ".mean(2, keepdim=True)", "[:, :1]"]))

    def operand(self, x: str, h: str, s: str, d: str, whole: str) -> None:
        """An input in a random layout, brought to [b, h, s, d]."""
        heads, width = self.sizes[h], self.sizes[d]
        letters, tail = self.c.pick([
            (f"b{h}{s}{d}", ""), (f"b{s}{h}{d}", ".transpose(1, 2)"), (f"b{s}{h}{d}", ".permute(0, 2, 1, 3)"),
            (f"b{s}{whole}", f".view({x}.shape[0], {x}.shape[1], {heads}, {width}).transpose(1, 2)"),
            (f"{s}b{h}{d}", ".permute(1, 2, 0, 3)"), (f"{h}b{s}{d}", ".transpose(0, 1)"),
            (f"b{h}{d}{s}", ".transpose(-1, -2)"),
            (f"b{s}{whole}", f".reshape({x}.shape[0], {x}.shape[1], {width}, {heads}).permute(0, 3, 1, 2)"),
            (f"b{s}{whole}", f".unflatten(-1, ({heads}, -1)).swapaxes(1, 2)"),
        ])
        self.new(letters, "float", self.c.integer(100) < 85, x)
        if tail:
            self.add(f"{x} = {x}{tail}")

    # -- the score tensor's axes ---------------------------------------------------------------------------------------

    def at(self, letter: str) -> int:
        return self.axes.index(letter)

    def index(self, letter: str) -> str:
        """Positions along one axis of ``s``, broadcastable to it."""
        i = self.at(letter)
        return f"torch.arange(s.shape[{i}])" + ("[:" + ", None" * (len(self.axes) - 1 - i) + "]") * (
            i + 1 < len(self.axes))

    def captured(self, kind: str, keep: int = 60) -> str:
        """An input that broadcasts against ``s`` in a random way."""
        letters = "".join(a if self.c.integer(100) < keep else "1" for a in self.axes)
        if self.c.chance(50):
            letters = letters.lstrip("1") or "1"
        grad = kind == "float" and self.c.chance(40)
        return self.new(letters, kind, grad)

    def predicate(self, depth: int = 0) -> str:
        c = self.c
        i, j = self.index("q"), self.index("k")
        kind = c.integer(11 if depth < 2 else 9)
        if kind == 0:
            return f"({j} {c.pick(['<=', '<', '>=', '>', '=='])} {i} + {c.pick([0, 1, -1, 2])})"
        if kind == 1:
            return self.captured(c.pick(["keep", "hole"]))
        if kind == 2:
            return f"({j} > {i} - {c.pick([2, 1, 3])})"
        if kind == 3:
            return f"({i} // 2 == {j} // 2)"
        if kind == 4 and self.axes in ("bhqk", "bhkq", "bqhk") and self.sizes["q"] == self.sizes["k"]:
            x = self.new("bq", "int")
            r = {"bhqk": ("[:, None, :, None]", "[:, None, None, :]"), "bhkq": ("[:, None, None, :]", "[:, None, :, None]"),
                 "bqhk": ("[:, :, None, None]", "[:, None, None, :]")}[self.axes]
            if c.chance(10):
                r = r[1], r[0]
            return f"({x}{r[0]} {c.pick(['==', '>=', '!='])} {x}{r[1]})"
        if kind == 5 and self.axes[0] == "b":
            x = self.new("b", "length")
            return f"({j} < {x}[:{', None' * (len(self.axes) - 1)}])"
        if kind == 6:
            return f"(({i} {c.pick('+-*')} {j}) % {c.pick([2, 3])} == 0)"
        if kind == 7 and self.axes.endswith("qk"):
            return f"torch.ones(s.shape[-2:], dtype=torch.bool).{c.pick(['tril', 'triu'])}({c.pick([0, 1, -1])})"
        if kind == 8:
            a = c.pick(self.axes)
            return f"({self.index(a)} {c.pick(['>', '!=', '<='])} {c.pick([0, 1])})"
        if kind == 9:
            return f"(~{self.predicate(depth + 1)})"
        if kind == 10:
            return f"({self.predicate(depth + 1)} {c.pick('&|^')} {self.predicate(depth + 1)})"
        return f"({j} <= {i})"

    def fill(self) -> str:
        fill = self.c.pick([INF, INF, "torch.finfo(s.dtype).min", "-1e9", "-1e4", "-3.0", "0.0", "2.0"])
        self.loose |= fill == "-1e9"
        return fill

    # -- steps on the scores ---------------------------------------------------------------------------------------------

    def mask(self) -> str:
        c, p, f = self.c, self.predicate(), self.fill()
        zero, fill = "torch.zeros((), dtype=s.dtype)", f"torch.full((), {f}, dtype=s.dtype)"
        forms = [f"s = s.masked_fill(~{p}, {f})", f"s = torch.where({p}, s, {f})", f"s = torch.where(~{p}, {fill}, s)",
                 f"s = s + torch.where({p}, {zero}, {fill})", f"s = s.masked_fill({p}, {f})",
                 f"m = torch.zeros(s.shape, dtype=s.dtype).masked_fill(~{p}, {f})\n    s = m + s"]
        if f != INF:
            forms += [f"s = s + (1.0 - {p}.to(s.dtype)) * {f}", f"s = s * {p}.to(s.dtype)",
                      f"s = s - (~{p}).to(s.dtype) * {f.removeprefix('-')}"]
        else:
            forms += [f"s = s.clone().masked_fill_((~{p}).expand(s.shape), {f})",
                      f"s = torch.where(~{p}, torch.full_like(s, {f}), s)"]
        return c.pick(forms)

    def step(self) -> str:
        c = self.c
        kind = c.integer(24) - 4
        if kind < 3:
            return c.pick(["s = s * {}", "s = {} * s", "s = s.mul({})", "s *= {}", "s = s / {}"]).format(
                c.pick(["0.5", "0.3", "1.7", "-0.4", "2.0"]))
        if kind < 10:
            return self.mask()
        if kind < 14:
            kind, a = c.pick(["float", "float", "additive"]), self.number()
            x = self.captured(kind)
            if kind == "additive":
                return c.pick([f"s = s + {x}", f"s = {x} + s", f"s += {x}", f"s = torch.rsub(s, {x})",
                               f"s = torch.add(s, {x}, alpha=2)"])
            return c.pick([f"s = s + {x}", f"s = {x} + s", f"s = torch.add(s, {x}, alpha={a})", f"s = s - {x}",
                           f"s += {x}", f"s = torch.sub(s, {x}, alpha={a})", f"s = torch.rsub(s, {x})"])
        if kind < 16:
            return c.pick(["s = 2.0 * torch.tanh(s / 2.0)", "s = torch.tanh(s)", "s = s.clamp(-1.0, 1.0)",
                           "s = s.clamp(min=-0.5)", "s = s.to(up(s))", "s = F.relu(s)", "s = torch.sigmoid(s)",
                           "s = s.abs()", "s = s * s", "s = 3.0 * torch.tanh(s / 2.0)", "s = F.softplus(s)",
                           "s = s - 1.0", "s = -s", "s = s.exp()"])
        if kind == 16:
            x = self.captured("float", 15)
            return c.pick([f"s = s * {x}", f"s = s * {x}.exp()", f"s = s / ({x}.abs() + 1.0)"])
        if kind == 17:
            dim = c.pick([self.at("k")] * 4 + [self.at("q"), 0])
            return c.pick([f"s = s - s.amax({dim}, keepdim=True)", f"s = s - s.amax({dim}, keepdim=True).detach()",
                           f"s = s - s.max({dim}, keepdim=True)[0]", f"s = s - s.mean({dim}, keepdim=True)",
                           f"s = s.amax({dim}, keepdim=True) - s"])
        if kind == 18:
            if c.chance(15):
                self.loose = True
                return c.pick(["s = s.float()", "s = s.float().to(q.dtype)"])
            return "s = s.to(up(s))"
        return c.pick(["s = s.contiguous()", "s = s.clone()", "s = s + s.transpose(-1, -2)", "s = s.flip(-1)",
                       "s = s + s.detach()", "s = s.roll(1, -1)", "s = s.nan_to_num()", "s = s.softmax(-1)"])

    # -- the whole ---------------------------------------------------------------------------------------------------------

    def written(self) -> None:
        c, h, g = self.c, self.h, self.g
        if c.chance(4):
            self.add("kept = k", "k = k.clone()")
        rank = c.pick([4, 4, 4, 3, 5] if g > 1 or h == 1 else [4, 4, 3, 5])
        if rank == 5:
            self.add(f"q = q.reshape(q.shape[0], {g}, {h // g}, q.shape[2], {self.d})",
                     "k, v = k[:, :, None], v[:, :, None]")
            self.axes = "bgrqk"
        elif h != g and (g > 1 or rank == 3 or c.chance(60)):
            forms = [f"X.repeat_interleave({h // g}, 1)", f"X.repeat(1, {h // g}, 1, 1)",
                     f"X[:, :, None].expand(-1, -1, {h // g}, -1, -1).reshape(X.shape[0], {h}, X.shape[2], X.shape[3])",
                     f"X[:, None].expand(-1, {h // g}, -1, -1, -1).reshape(X.shape[0], {h}, X.shape[2], X.shape[3])"]
            form = c.pick(forms)
            self.add("k = " + form.replace("X", "k"), "v = " + (c.pick(forms) if c.chance(20) else form).replace("X", "v"))
        if rank == 3:
            if c.chance(20):
                self.add("q, k, v = q[0], k[0], v[0]")
                self.axes = "hqk"
            else:
                self.add(f"n = q.shape[0] * {h}", "q, k, v = (x.reshape(n, -1, x.shape[-1]) for x in (q, k, v))")
                self.axes = "nqk"
        self.product(rank)
        if c.integer(100) < 75 and "alpha" not in self.lines[-1]:
            x = self.number()
            self.add(c.pick([f"s = s * {x}", f"s = s / {x if x != '0.0' else '4.0'}", f"s = {x} * s", f"s *= {x}",
                             f"s = s * torch.full((), {x}, dtype=s.dtype)"]))
        for _ in range(c.pick([1, 0, 2, 3, 4])):
            self.add(self.step())
        self.use("s", 4)
        self.softmax()
        for _ in range(c.pick([0] * 8 + [1, 2])):
            self.add(self.after())
        self.use("p", 4)
        self.values(rank)
        self.output()

    def use(self, name: str, percent: int) -> None:
        """A second user of an intermediate value."""
        if self.c.chance(percent):
            self.add(f"o{len(self.extra)} = {name}" + self.c.pick(["", ".sum()", ".mean(-1)", ".detach()", " * 1.0"]))
            self.extra.append(f"o{len(self.extra)}")

    def product(self, rank: int) -> None:
        c = self.c
        lead = self.axes[:-2]
        if c.chance(3):
            self.add(c.pick(["s = q @ k", "s = k @ q.mT", "s = q.mT @ k", "s = q @ k.transpose(1, 2)",
                             f"s = torch.einsum('{lead}qd,{lead}dk->{lead}qk', q, k)"]))
            return
        forms = ["s = q @ k.transpose(-1, -2)", "s = torch.matmul(q, k.mT)", "s = (k @ q.mT).mT", "s = q @ k.mT", "s = torch.matmul(q, k.mT)",
                 "s = (q[..., :, None, :] * k[..., None, :, :]).sum(-1)", "s = (q * 0.5) @ (k.mT * 0.5)"]
        if rank != 5 and self.h == self.g:
            forms.append(f"s = torch.einsum('{lead}qd,{lead}kd->{lead}qk', q, k)")
        if rank == 3:
            x, y = self.number(), c.pick(["0", "1", "0.5"])
            b = f"torch.zeros((), dtype=q.dtype).expand(q.shape[0], q.shape[1], k.shape[1]), q, k.mT, beta={y}"
            forms += ["s = torch.bmm(q, k.transpose(1, 2))", f"s = torch.baddbmm({b}, alpha={x})"] * 2
        form = c.pick([*forms, "kq"])
        if form == "kq" or c.chance(5):
            self.add("s = " + c.pick(["k @ q.mT", "torch.matmul(k, q.transpose(-2, -1))", "(q @ k.mT).mT"]))
            self.axes = lead + "kq"
        elif rank == 4 and c.chance(10):
            self.add(form, "s = s.transpose(1, 2)")
            self.axes = "bqhk"
        else:
            self.add(form)

    def softmax(self) -> None:
        c = self.c
        right = self.at("k")
        dim = c.integer(len(self.axes)) if c.chance(4) else right
        d = dim - len(self.axes) if c.integer(2) == 0 else dim
        if c.chance(6) and dim == right == len(self.axes) - 1:
            letters = "".join(a if c.chance(50) else "1" for a in self.axes[:-1]) + "1"
            x = self.new(letters, "float", c.chance(50))
            self.add(f"z = torch.cat([s, {x}.expand(*s.shape[:-1], 1)], -1)",
                     c.pick(["p = torch.softmax(z, -1)[..., :-1]", "p = torch.softmax(z - z.amax(-1, True), -1)[..., :-1]",
                             "p = torch.softmax(z, -1)[..., 1:]"]))
            return
        e = f"e = (s - s.amax({d}, keepdim=True)).exp()"
        self.add(*c.pick([
            [f"p = torch.softmax(s, {d})"], [f"p = F.softmax(s, dim={d})"], [f"p = s.softmax({d})"],
            [f"p = F.softmax(s, dim={d}, dtype=up(s)).to(q.dtype)"], [f"p = s.to(up(s)).softmax({d}).type_as(q)"],
            [e, f"p = e / e.sum({d}, keepdim=True)"], [f"e = s.exp()\n    p = e / e.sum({d}, keepdim=True)"],
            [f"p = torch.log_softmax(s, {d}).exp()"], [f"p = torch.exp(s - torch.logsumexp(s, {d}, keepdim=True))"],
            [e, f"p = e / (e.sum({d}, keepdim=True) + {c.pick(['1.0', '1e-9'])})"],
            [e, f"p = e * e.sum({d}, keepdim=True).reciprocal()"], [e.replace("exp()", "exp2()"),
                                                                   f"p = e / e.sum({d}, keepdim=True)"]][:]
            if c.chance(20) else [[f"p = torch.softmax(s, {d})"]]))

    def after(self) -> str:
        p = self.predicate() if self.c.chance(30) else "(s > 0)" if self.c.chance(10) else None
        if p:
            return self.c.pick([f"p = p * {p}.to(p.dtype)", f"p = p.masked_fill(~{p}, 0.0)",
                                f"p = torch.where({p}, p, torch.zeros((), dtype=p.dtype))"])
        return self.c.pick(["p = p.to(v.dtype)", "p = F.dropout(p, 0.0)", "p = p.type_as(v)", "p = p.contiguous()",
                            "p = p.nan_to_num(0.0)", "p = p * 0.5", "p = p / p.sum(-1, keepdim=True)", "p = p.clone()",
                            "p = p / 0.5", "p = F.dropout(p, 0.5, training=False)", "p = p.detach()", "p = p + 0.1",
                            "p = p[..., :-1].repeat_interleave(1, -1)" if self.sizes["k"] == 1 else "p = p.view(p.shape)"])

    def values(self, rank: int) -> None:
        c = self.c
        if any(line == "kept = k" for line in self.lines):
            self.add(c.pick(["k.add_(1.0)", "k.zero_()", "kept = kept + 1.0"]))
        self.add("p = p.to(v.dtype)")
        lead, tail = self.axes[:-2], self.axes[-2:]
        if c.chance(3):
            self.add(c.pick(["o = p @ v.transpose(1, 2)", "o = p.mT @ v", "o = p @ v.mT", "o = v @ p", "o = (p * p) @ v"]))
        elif self.axes == "bqhk":
            self.add(c.pick(["o = p.transpose(1, 2) @ v", "o = torch.einsum('bqhk,bhke->bhqe', p, v)" if self.h == self.g
                             else "o = p.permute(0, 2, 1, 3) @ v"]))
        elif tail == "kq":
            self.add(c.pick(["o = p.mT @ v", "o = (v.mT @ p).mT", "o = p.transpose(-2, -1).matmul(v)"]))
        else:
            forms = ["o = p @ v", "o = torch.matmul(p, v)", "o = (v.mT @ p.mT).mT"]
            if rank != 5 and self.h == self.g:
                forms.append(f"o = torch.einsum('{lead}qk,{lead}ke->{lead}qe', p, v)")
            if rank == 3:
                forms += ["o = torch.bmm(p, v)"] * 2
            self.add(c.pick(forms))

    def output(self) -> None:
        self.use("o", 8)
        tail = self.c.pick(["", "", ".contiguous()", ".mT", ".flatten(1)", ".sum(-1)", " * 2.0", ".transpose(0, 1)",
                            ".transpose(1, 2).reshape(o.shape[0], -1)", ".sin()", ".flatten(0, 1)"])
        self.add(f"return ({', '.join([f'o{tail}', *self.extra])},)")

    def sdpa(self) -> None:
        """PyTorch's own operator with random arguments; its scores are not seen, so ``s`` only has their shape."""
        c, h, g = self.c, self.h, self.g
        if h != g:
            self.add(f"k, v = (x.repeat_interleave({h // g}, 1) for x in (k, v))")
        self.add("s = torch.empty(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype)")
        p = self.predicate()
        mask = c.pick(["", "", ", is_causal=True", f", attn_mask=({p}).expand(s.shape)",
                       f", attn_mask=torch.zeros_like(s).masked_fill({p}, {self.fill()})",
                       f", attn_mask={self.captured('float')}.expand(s.shape)"])
        # PyTorch's CPU operator itself gives NaN for a negative scale with anything masked (2.13)
        scale = c.pick(["", ", scale=0.3", ", scale=1.0", *([] if mask else [", scale=-0.5"])])
        self.add(f"o = F.scaled_dot_product_attention(q, k, v{mask}{scale})")
        self.output()
