#!/usr/bin/env bash
# Fine-tunes a network from ImageNet in six ways, in minutes on two cores: EfficientNet-Lite0 (64x64)
# on 3,200 photographs of clothes. Ends with a table and two figures.
set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/_venv.sh"

seeds=1
usage() {
    cat <<END
usage: run_demo.sh [--seeds N]

Trains, prints a table (plot.py table) and writes figures/demo.png and figures/demo_selection.png.
The timing table and finished runs in logs/ are reused. The ImageNet weights come with a Python
package. Fashion-MNIST comes with Debian's package dataset-fashion-mnist; where that is not
installed, 30 MB are downloaded.
  --seeds N    train each scheme with seeds 0 to N-1 (default: $seeds)
END
}
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit ;;
        --seeds) seeds=${2-}; shift $(($# > 1)) ;;
        --seeds=*) seeds=${1#--seeds=} ;;
        *) echo "error: unknown argument '$1'; see --help" >&2; exit 2 ;;
    esac
    shift
done
if ! [[ $seeds =~ ^[1-9][0-9]*$ ]]; then
    echo "error: --seeds takes a whole number from 1; got '$seeds'" >&2
    exit 2
fi

ensure_venv today
cd "$ROOT"
start=$SECONDS
network=(--model_name efficientnet_lite0 --input_size 64 --batch_size 32)
# All ways but the last use six epochs and one learning rate, within half a point of the best for full
# training. Without the warm-up, full training may diverge. Tensors are selected before epochs 1 and 4.
data=(--dataset_name fashion_mnist --augmentation none)
training=(--train_images 3200 --test_images 2500 --num_epochs 6 --interval 3 --learning_rate 0.005
          --warmup_steps 50)
say() { printf '\n== %s\n' "$*"; }

say "profile: what each tensor costs on this machine"
"$PYTHON" profiler.py "${network[@]}" "${data[@]}" --num_classes 10 | tail -n 8

# train NAME TYPE [FLAG ...]: trains one run with the seed of the loop below.
runs=()
train() {
    local name="demo_$1_seed$seed"
    say "$name"
    "$PYTHON" main.py "${network[@]}" "${data[@]}" "${training[@]}" --seed "$seed" --run_name "$name" \
        --train_type "${@:2}"
    runs+=("$name")
}

# At rho 0.5, elastic training has no cache, as in the paper. A third of the epochs of full training
# takes about as long as rho 0.3 does with the cache; it has the learning rate that suits it best.
for ((seed = 0; seed < seeds; seed++)); do
    train full full_training
    train head traditional_tl_training
    train bn_bias bn_plus_bias_training
    train elastic0.5 elastic_training --rho 0.5 --prefix_cache off
    train elastic0.3 elastic_training --rho 0.3
    train full_cut full_training --num_epochs 2 --learning_rate 0.003
done

say "result"
"$PYTHON" plot.py table "${runs[@]}"
"$PYTHON" plot.py curves "${runs[@]}" --output figures/demo
"$PYTHON" plot.py selection demo_elastic0.3_seed0 --output figures/demo_selection
echo "the demo took $((SECONDS - start)) s"
