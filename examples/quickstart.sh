#!/usr/bin/env bash
# From nothing to a trained ExoFormer on this machine, CPU or GPU, without downloads beyond the installation.
#
#   bash examples/quickstart.sh [arguments of training, such as --exo-variant e-nuresformer]
#
# Sets up .venv, gathers English text from what is installed, trains a tokenizer, tokenises, trains the demo preset at
# tensor parallelism 2 (1 where there is a single GPU), evaluates, saves, draws the loss, converts the model for Hugging
# Face and lets it write a paragraph. What exists is reused, and an interrupted training goes on where it was saved.
# Delete runs/demo (or the folder that MEGATRON_EXO_DEMO names) to begin anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

demo=${MEGATRON_EXO_DEMO:-runs/demo}
data=$demo/data
run=$demo/run
model=$demo/model
started=$SECONDS
step() { printf '\n== %s (after %d s)\n' "$1" $((SECONDS - started)); }

step "environment"
bash tools/setup_env.sh hf
python=.venv/bin/python

step "text: English prose from the documentation of what is installed"
if [[ -f $data/train.jsonl && -f $data/validation.jsonl ]]; then
    echo "reusing $data"
else
    "$python" tools/build_demo_corpus.py --output-dir "$data"
fi

step "tokenizer: SentencePiece, 8,192 tokens"
if [[ -f $data/tokenizer.model ]]; then
    echo "reusing $data/tokenizer.model"
else
    "$python" tools/train_tokenizer.py --input "$data/train.jsonl" --output "$data/tokenizer" --vocab-size 8192
fi

step "dataset"
for split in train validation; do
    if [[ -f $data/$split.idx ]]; then
        echo "reusing $data/$split"
    else
        "$python" tools/preprocess_data.py --input "$data/$split.jsonl" --output-prefix "$data/$split" \
            --tokenizer-type SentencePieceTokenizer --tokenizer-model "$data/tokenizer.model"
    fi
done

step "training"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus == 1 ? 1 : 2))
bash examples/pretrain_exoformer.sh --nproc-per-node "$ranks" --tensor-model-parallel-size "$ranks" --sequence-parallel \
    --preset demo --save "$run" --load "$run" "$@"

step "loss curve"
"$python" tools/plot_curve.py "$run" --output "$demo/loss.png" --unigram-entropy "$data/validation"

step "Hugging Face: the last checkpoint as a folder, held against Megatron's model"
rm -rf "$model"
"$python" tools/convert_to_hf.py "$run" "$model"

step "text: a paragraph by that folder"
"$python" tools/generate.py "$model" --prompt "The list of all" --max-new-tokens 100 --temperature 0.8 --top-p 0.95

cat <<EOF

Done in $((SECONDS - started)) s.
  checkpoints   $run
  loss curve    $demo/loss.png
  every line    $run/logs
  numbers       $run/logs/metrics.jsonl
  model         $model

Next:
  another variant       bash examples/pretrain_exoformer.sh --nproc-per-node 2 --tensor-model-parallel-size 2 \\
                            --exo-variant e-nuresformer --save runs/nu --load runs/nu
  its perplexity        .venv/bin/python tools/evaluate.py $run --data $data/validation
  both in one picture   .venv/bin/python tools/plot_curve.py $run runs/nu --output compare.png
  all arguments         bash examples/pretrain_exoformer.sh --help
  your own text         .venv/bin/python tools/preprocess_data.py --help
  this machine          .venv/bin/python -m megatron_exo.doctor
EOF
