"""The same ranks from every launcher's variables."""

import pytest

from launcher.cluster import Placement, derived_port, expand_nodes, placement

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29400",
}
DEEPSPEED = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "4",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "gpu07",
}


@pytest.mark.parametrize(
    "environment", [SLURM, TORCHRUN, DEEPSPEED, OPENMPI], ids=["slurm", "torchrun", "deepspeed", "openmpi"]
)
def test_every_launcher_gives_the_same_ranks(environment: dict[str, str]) -> None:
    place = placement(environment)
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert place.master_addr == "gpu07"
    assert place.master_port > 0


def test_without_a_launcher_a_process_is_alone() -> None:
    assert placement({"HOME": "/home/user"}) == Placement(
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        master_addr="127.0.0.1",
        master_port=0,
        launcher="none",
    )


def test_torchrun_under_slurm_is_torchrun() -> None:
    assert placement(SLURM | TORCHRUN | {"RANK": "2"}).rank == 2


def test_the_batch_script_is_no_task() -> None:
    script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"} | {
        "SLURM_PROCID": "0",
        "ENVIRONMENT": "BATCH",
    }
    assert placement(script).world_size == 1
    assert placement(script | {"SLURM_STEP_ID": "0"}).world_size == 8
    assert placement(SLURM | {"SLURM_STEP_ID": "4294967291"}).world_size == 1  # the batch step itself
    assert placement(SLURM | {"SLURM_STEP_ID": "4294967290"}).world_size == 1  # an interactive shell


def test_the_port_belongs_to_the_job_step() -> None:
    ports = {
        placement(SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}).master_port for rank in range(8)
    }
    assert len(ports) == 1
    jobs = [derived_port(str(123456 + job), "0") for job in range(50)]
    assert len(set(jobs)) == 50
    assert derived_port("123456", "0") != derived_port("123456", "1")
    assert all(15000 <= port < 32768 for port in jobs)
    assert derived_port("prterun-host-1@1", "openmpi") != derived_port("prterun-host-2@1", "openmpi")


def test_a_port_that_is_given_is_kept() -> None:
    assert placement(SLURM | {"MASTER_PORT": "4000", "MASTER_ADDR": "other"}).master_port == 4000
    assert placement(SLURM | {"MASTER_PORT": "4000", "MASTER_ADDR": "other"}).master_addr == "other"


def test_a_step_on_fewer_nodes_has_its_own_first_node() -> None:
    step = {"SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "6"}
    place = placement(SLURM | step | {"SLURM_NODEID": "0"})
    assert (place.master_addr, place.world_size, place.local_size) == ("gpu08", 6, 6)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[001,005-006]-ib,login", ["n001-ib", "n005-ib", "n006-ib", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


def test_openmpi_on_one_machine_needs_no_address() -> None:
    place = placement(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "prterun-host-77@1",
        }
    )
    assert (place.rank, place.world_size, place.master_addr) == (1, 2, "127.0.0.1")
    assert place.master_port > 0


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "rank 2 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        ({k: v for k, v in OPENMPI.items() if k != "MASTER_ADDR"}, "-x MASTER_ADDR=HOST"),
        (SLURM | {"SLURM_JOB_NODELIST": ",", "SLURM_STEP_NODELIST": ","}, "names no machine"),
    ],
)
def test_variables_that_cannot_be_right(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement(environment)
