"""CPU operations with known results: arithmetic, linear algebra, convolution, autograd, training, saving, threads."""

import io
import json
import sys
import threading

import torch


def checks():
    a = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    yield "matmul", torch.equal(a @ a.T, torch.tensor([[5.0, 14.0], [14.0, 50.0]], dtype=torch.float64))
    yield "reduce", a.sum().item() == 15 and a.max().item() == 5 and a.mean(0).tolist() == [1.5, 2.5, 3.5]
    m = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    yield (
        "solve",
        torch.allclose(
            torch.linalg.solve(m, m @ torch.ones(2, dtype=torch.float64)), torch.ones(2, dtype=torch.float64)
        ),
    )
    image = torch.ones(1, 1, 4, 4)
    yield "conv", torch.nn.functional.conv2d(image, torch.ones(1, 1, 3, 3)).flatten().tolist() == [9.0] * 4
    x = torch.tensor([3.0], requires_grad=True)
    (x**3).sum().backward()
    yield "autograd", x.grad.tolist() == [27.0]
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    data = torch.randn(64, 3)
    wanted = data @ torch.tensor([[1.0], [-2.0], [0.5]])
    losses = []
    for _ in range(60):  # by hand: torch.optim imports the compiler, which takes seconds
        loss = torch.nn.functional.mse_loss(layer(data), wanted)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), gradients):
                parameter -= 0.1 * gradient
    yield "training", losses[-1] < losses[0] / 100
    file = io.BytesIO()
    torch.save({"a": a}, file)
    file.seek(0)
    yield "save", torch.equal(torch.load(file, weights_only=True)["a"], a)
    scripted = torch.jit.script(torch.nn.ReLU())
    yield "script", scripted(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(torch.full((100,), float(n)).sum().item()))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield "threads", sorted(results) == [0.0, 100.0, 200.0, 300.0]
    yield "nccl is built in", torch.distributed.is_nccl_available() and torch.cuda.nccl.version() > (2, 0)


wrong = [name for name, right in checks() if not right]
print("M8D " + json.dumps({"outcome": f"wrong: {', '.join(wrong)}" if wrong else "right"}))
sys.exit(0)
