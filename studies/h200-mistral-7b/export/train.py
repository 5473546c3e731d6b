# autotune study h200-mistral-7b: mistralai/Mistral-7B-v0.3 on h200-sxm; Configuration: lora r64 16x1024 bf16_mixed ckpt-none adamw_torch_fused compiled chunked-loss, 2 micro batches a step
# Expect (measured): 1.9 s a step, 17,374 useful tokens/s, peak 92.7 GiB of 131.9 GiB; Full run: 10,000 examples, 1 epoch(s), 313 steps: 9 min 50 s (9 min 44 s to 9 min 56 s), $0.556
# Probed with transformers on NVIDIA H200, driver 580.159.04, CUDA 13.0; Fingerprint 4b243894ad88: python 3.12.3, accelerate 1.15.0, bitsandbytes 0.50.2, peft 0.21.0, torch 2.11.0, transformers 5.17.0
"""Fine-tunes with exactly the configuration that was probed, through transformers.Trainer and peft."""
import argparse, copy, functools, importlib, json, os, pathlib, statistics, tempfile, time, types  # noqa: E401, I001

run = types.SimpleNamespace(**{
    'model': 'mistralai/Mistral-7B-v0.3', 'has_weights': True, 'method': 'lora', 'micro_batch_size': 16,
    'seq_len': 1024, 'lora_rank': 64, 'optimizer': 'adamw_torch_fused', 'precision': 'bf16_mixed',
    'quantization': 'none', 'checkpointing': 'none', 'attention': 'sdpa', 'compile': 'per_layer', 'loss': 'chunked',
    'packing': False, 'dora': False, 'rslora': False, 'loader_workers': 0, 'base_dtype': 'bfloat16',
    'bitsandbytes': None,
    'lora': {'r': 64, 'lora_alpha': 128, 'lora_dropout': 0.0, 'target_modules': 'all-linear', 'task_type': 'CAUSAL_LM', 'use_dora': False, 'use_rslora': False},
    'checkpoint_every': None, 'examples': 10000, 'lengths': [1024], 'epochs': 1, 'accumulation': 2,
    'learning_rate': 0.0002, 'warmup_steps': 9, 'save_steps': 313})
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # torch reads it when it starts
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # one GPU, as measured: Trainer would split batches over all
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default=run.model, metavar="NAME_OR_DIR", help="Hub name or directory of the weights")
parser.add_argument("--dataset", metavar="FILE.jsonl", help="lines with text, prompt and completion, or messages")
parser.add_argument("--random-weights", action="store_true", help="random weights and tokens, to measure the speed")
parser.add_argument("--lengths", metavar="FILE", help="of random examples, one a line, instead of those probed")
parser.add_argument("--max-steps", type=int, default=-1, metavar="N", help="stop after N optimizer steps")
parser.add_argument("--held-out", nargs=2, type=int, default=(0, 0), help="N TOKENS: the last N only tell a loss")
parser.add_argument("--output-dir", default="out", help="for checkpoints and what was trained; '' saves none")
args = parser.parse_args()
no_weights = args.model == run.model and not run.has_weights
if no_weights and args.dataset:
    parser.error("this model has no published weights: name another with --model, or leave --dataset out")
if args.random_weights == bool(args.dataset) and not no_weights:
    parser.error("give either --dataset FILE.jsonl to train, or --random-weights to measure the speed alone")

for file in filter(None, (args.dataset, args.lengths)):
    os.path.isfile(file) or parser.error(f"there is no file {file}")
# Heavy imports wait until the arguments are known to be right.
import torch, transformers as hf, transformers.initialization, transformers.modeling_layers  # noqa: E401, E402
from peft import LoraConfig, get_peft_model  # noqa: E402
import rows  # noqa: E402
cuda, dtype = torch.cuda.is_available(), getattr(torch, run.base_dtype)
device = torch.device("cuda:0" if cuda else "cpu")
build = {"dtype": dtype, "attn_implementation": run.attention}
hf.set_seed(0)
if args.dataset:  # real weights: safetensors only, never code from the Hub
    tok = hf.AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    examples = rows.read(args.dataset, tok, max(run.seq_len, args.held_out[1]))
    if run.bitsandbytes:
        build["quantization_config"] = hf.BitsAndBytesConfig(**run.bitsandbytes, bnb_4bit_compute_dtype=dtype)
    build |= {"device_map": {"": device}, "use_safetensors": True, "trust_remote_code": False}
    model = hf.AutoModelForCausalLM.from_pretrained(args.model, **build)
else:  # random weights of the same shape, full rows of random tokens
    shape = json.loads(pathlib.Path(__file__).with_name("model_config.json").read_text(encoding="utf-8"))
    # A base to be quantised is laid out in CPU memory that nothing touches; one layer of each size is then copied.
    with torch.device("cpu") if run.bitsandbytes else device, hf.initialization.no_init_weights():
        shape = hf.AutoConfig.for_model(shape.pop("model_type"), **shape)
        model = hf.AutoModelForCausalLM.from_config(shape, **build)
    linears, made = [(name, layer) for name, layer in model.named_modules() if type(layer) is torch.nn.Linear], {}
    for name, layer in linears if run.bitsandbytes else ():
        import bitsandbytes as bnb
        kwargs = run.linear | ({"compute_dtype": dtype} if run.quantization == "nf4" else {})
        kind = bnb.nn.Linear4bit if run.quantization == "nf4" else bnb.nn.Linear8bitLt
        size = (layer.in_features, layer.out_features, layer.bias is not None)
        if layer is not model.get_output_embeddings():
            made[size] = copy.deepcopy(made[size]) if size in made else kind(*size, **kwargs).to(dtype).to(device)
            model.set_submodule(name, made[size])
    [norm.reset_parameters() for norm in model.modules() if isinstance(norm, torch.nn.LayerNorm)]  # were not initialised
    for name, weight in model.to(device).named_parameters():  # norms keep their ones
        if weight.is_floating_point() and (weight.ndim > 1 or name.endswith("bias")):
            weight.data.normal_(0.0, 0.02 if weight.ndim > 1 else 0.0)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = run.quantization == "nf4", run.quantization == "int8"
    lengths = rows.read_lengths(args.lengths, run.seq_len) if args.lengths else run.lengths
    lengths *= max(1, 64 // len(lengths))
    examples = [torch.randint(0, model.config.vocab_size, (length,)) for length in lengths]
    examples = (examples * (run.examples // len(examples) + 1))[: run.examples]
examples, held_out = rows.split(examples, run.seq_len, *args.held_out)
model.config.use_cache = False
layers = [layer for layer in model.modules() if isinstance(layer, hf.modeling_layers.GradientCheckpointingLayer)]
if run.checkpoint_every:
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # renamed in 5.23
    enable({"use_reentrant": False})
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % run.checkpoint_every == 0
loss = importlib.import_module("chunked_loss").chunked_loss(model) if run.loss == "chunked" else None
if run.lora:
    model = get_peft_model(model, LoraConfig(**run.lora), autocast_adapter_dtype=run.precision != "bf16_pure")
packed = rows.pack(examples, run.seq_len) if run.packing else [[example] for example in examples]

class Clock(hf.TrainerCallback):
    starts = []
    def on_step_begin(self, *_, **__):
        torch.cuda.synchronize() if cuda else None
        self.starts.append(time.perf_counter())
    on_train_end = on_step_begin

settings = hf.TrainingArguments(  # the learning rate is a common default, it was not tuned
    output_dir=args.output_dir or tempfile.mkdtemp(), max_steps=args.max_steps, num_train_epochs=run.epochs, use_cpu=not cuda,
    per_device_train_batch_size=run.micro_batch_size, gradient_accumulation_steps=run.accumulation,
    optim=run.optimizer, bf16=run.precision == "bf16_mixed", fp16=run.precision == "fp16_mixed", max_grad_norm=1.0,
    learning_rate=run.learning_rate, lr_scheduler_type="cosine", warmup_steps=run.warmup_steps, logging_steps=10,
    save_strategy="steps" if args.dataset and args.output_dir and args.max_steps < 1 else "no", report_to=[],
    logging_nan_inf_filter=False, dataloader_drop_last=True, dataloader_pin_memory=cuda, per_device_eval_batch_size=1,
    save_steps=run.save_steps, dataloader_num_workers=run.loader_workers)
collate = functools.partial(rows.collate, seq_len=run.seq_len, packing=run.packing)
trainer = hf.Trainer(model, settings, collate, packed, held_out, compute_loss_func=loss, callbacks=[Clock()])
losses = [trainer.evaluate()["eval_loss"]] if held_out else []
if run.compile == "per_layer":  # only now, so that layers are compiled for what they train on
    torch._dynamo.config.recompile_limit = 64  # what was compiled when probed is compiled here: nothing runs eager
    run.lora and model.enable_input_require_grads()  # or the first layer is compiled apart
    for layer in layers:
        layer.compile(dynamic=False)
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats() if cuda else None
steps = trainer.train().global_step
for layer in layers: layer._compiled_call_impl = None  # noqa: E701 (held-out examples are of many lengths)
trainer.save_model(args.output_dir) if args.dataset and args.output_dir else None
times = [end - start for start, end in zip(Clock.starts[1:], Clock.starts[2:])]  # the first step warms up
seconds = statistics.median(times) if times else None
tokens = run.micro_batch_size * run.accumulation * sum(map(len, examples)) / len(packed)  # padding does not count
peak = torch.cuda.max_memory_reserved() / 2**30 if cuda else None
print(json.dumps({"steps": steps, "seconds_per_step": seconds, "tokens_per_second": seconds and tokens / seconds,
                  "peak_reserved_gib": peak, "held_out_loss": losses and [*losses, trainer.evaluate()["eval_loss"]]}))
