# Sourced by the batch scripts of this folder: a job that gives its nodes back in time, and comes back by itself.
#
# SLURM announces the end in two ways.
#
#   `#SBATCH --signal=B:USR1@300`   SIGUSR1 to the batch shell, 300 seconds before the time limit
#   preemption                      SIGTERM to all processes of the job's steps, but not to the batch shell; SIGKILL when the
#                                   partition's GraceTime is over
#
# Either way the ranks finish their iteration, save and end, and run_stoppable puts the job back into the queue: to SLURM, a
# job that ends before its grace time is over has simply ended. The next attempt goes on from the checkpoint
# (--resume=auto). A job that a person cancels saves too, and stays cancelled. `scancel --signal=USR1 JOB` (without --batch)
# asks the ranks to save and end the job for good.

# run_stoppable COMMAND...  Run an srun command. Returns its exit code if it ended by itself; else requeues, and ends the job.
run_stoppable() {
    local stopped="" child="" code=0
    trap 'pass_on SIGUSR1' USR1
    trap 'pass_on SIGTERM' TERM
    "$@" &
    child=$!
    if [[ -n $stopped ]]; then kill -USR1 "$child"; fi # the signal came first
    # A trapped signal ends `wait` early, with a code above 128: wait again for as long as the child lives.
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do
        code=0
        wait "$child" || code=$?
    done
    trap - USR1 TERM
    case $(scontrol --oneliner show job "$SLURM_JOB_ID") in
        *JobState=COMPLETING*) # cancelled, or requeued by SLURM itself or by a person: not ours to decide
            say "ended with exit code $code while SLURM is ending the job"
            exit "$code" ;;
        *PreemptTime=2*) stopped=${stopped:-preemption} ;;
    esac
    if [[ -n $stopped ]]; then
        say "stopped by $stopped, exit code $code: back into the queue"
        scontrol requeue "$SLURM_JOB_ID" && sleep 300 # SLURM ends this script meanwhile
        exit "$code"
    fi
    return "$code"
}

# srun passes SIGUSR1 on to all processes of its step.
pass_on() {
    stopped=$1
    say "$stopped: asking the ranks to save and stop"
    if [[ -n $child ]]; then kill -USR1 "$child" || true; fi # it may have ended just now
}

say() { echo "$(date '+%F %T') $*"; }

# What each task starts with. SLURM delivers a step's signal to all its processes, and SIGUSR1 would kill torchrun, which
# has no handler for it and does not pass it on, and a Python that is still starting. What a shell ignores its children
# ignore from their start on; the ranks then install a handler of their own, and nobody else needs to hear the signal.
# The end of the job is announced to the batch shell, which requeues: ranks must not stop for it by themselves.
task_shell=(bash -c 'trap "" USR1; unset SLURM_JOB_END_TIME; exec "$@"' --)

# The address of the job's first node, as SLURM knows it, and a port that other jobs on that node do not use.
first_node_address() {
    local first
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    scontrol --oneliner show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
}
job_port() { echo $((10000 + SLURM_JOB_ID % 20000)); }
