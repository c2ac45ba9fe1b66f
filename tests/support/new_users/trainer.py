"""What a new user of Hugging Face's Trainer writes, from the README alone."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from shrinkpoint.callbacks.transformers import CompressedCheckpoint


class Progress(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)


set_seed(1)
rows = torch.randint(0, 64, (256, 32))
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
trainer = Trainer(
    model,
    TrainingArguments(
        "output",
        max_steps=40,
        save_steps=10,
        eval_strategy="steps",
        eval_steps=10,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=data,
    eval_dataset=data[:64],
    callbacks=[CompressedCheckpoint("run"), Progress()],
)
trainer.train()  # no resume_from_checkpoint
print("done", trainer.state.global_step, flush=True)
