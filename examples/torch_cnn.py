"""A small convolutional network on scikit-learn's handwritten digits, trained by many processes.

    weft run -n 2 examples/torch_cnn.py          or alone: python examples/torch_cnn.py

Each rank trains its own copy on a share of the digits, at its own pace; `weft.ModelTable` adds up
what they learn. Rank 0 prints the share of digits that nobody was shown and that it gets right,
which must be over 0.9.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import weft

EPOCHS, BATCH = 8, 32

weft.init(seed=1)  # another order of digits on each rank
torch.set_num_threads(1)  # a network this small is slower with more

# every fifth digit is for validation; of the others each rank has its share
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
held_back = torch.arange(len(labels)) % 5 == 0
mine = torch.nonzero(~held_back).flatten()[weft.rank() :: weft.size()]

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
table = weft.ModelTable(model)  # everybody starts with rank 0's parameters
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / weft.size(), momentum=0.9)

for _ in range(EPOCHS):
    for batch in mine[torch.randperm(len(mine))].split(BATCH):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table.sync()  # add this step, take everybody's
    weft.barrier()  # nobody is ahead by more than an epoch

table.sync()
with torch.no_grad():
    guesses = model(images[held_back]).argmax(dim=1)
right = (guesses == labels[held_back]).float().mean().item()
if weft.is_master():
    print(f"{weft.size()} workers: {right:.3f} of {len(guesses)} digits are right")
assert right > 0.9, right
