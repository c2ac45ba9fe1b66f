"""What a new user of accelerate writes, from the README and docs/loop.md alone."""

import torch
from accelerate import Accelerator
from torch import nn

import shrinkpoint

torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
data = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
held_out = data[:64]
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
bare = accelerator.unwrap_model(model)
checkpointer = shrinkpoint.Checkpointer(
    "run",
    bare,
    optimizer,
    every=10,
    scheduler=scheduler,
    evaluate=lambda: nn.functional.cross_entropy(bare(held_out[0]), held_out[1]).item(),
)
batches = iter(())
for step in range(checkpointer.resume(), 40):
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        batch = next(batches)
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    checkpointer.step(step + 1)
    print("step", step + 1, flush=True)
checkpointer.close()
print("done", step + 1, flush=True)
