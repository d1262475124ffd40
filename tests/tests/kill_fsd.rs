//! `kill -9` of fsd and its keepers at random moments, with eight readers blocked in cold reads.
//!
//! Every byte that a reader gets is compared. Rounds: `LAMELLA_KILL_ROUNDS` (10; the full matrix is
//! 100). A kill counts as a hit when it met an event that was read and not answered, by the journal
//! that outlives fsd; fewer than half hits is a failure, because then nothing was tested.
#![allow(clippy::unwrap_used)]

mod fsd_world;

use fsd_world::{LayerShape, Random, World, first_difference};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const READERS: usize = 8;

/// Who is killed in a round.
#[derive(Debug, Clone, Copy)]
enum Victim {
    Fsd,
    Keeper(usize),
    BothKeepers,
    FsdAndKeeper(usize),
    /// The successor too, at some moment of its takeover.
    FsdAndSuccessor,
}

const VICTIMS: [Victim; 7] = [
    Victim::Fsd,
    Victim::Keeper(0),
    Victim::FsdAndKeeper(1),
    Victim::Keeper(1),
    Victim::FsdAndKeeper(0),
    Victim::FsdAndSuccessor,
    Victim::BothKeepers,
];

/// Threads that read all files, each in an order of its own, in pieces.
struct Readers {
    threads: Vec<JoinHandle<()>>,
    complaints: Arc<Mutex<Vec<String>>>,
    errors: Arc<AtomicUsize>,
    pieces: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Readers {
    fn start(world: &World, at: &Path, seed: u64) -> Self {
        let complaints = Arc::new(Mutex::new(Vec::new()));
        let (errors, pieces) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..READERS)
            .map(|index| {
                let mut files: Vec<(PathBuf, Vec<u8>)> = world
                    .layer
                    .files
                    .iter()
                    .map(|(name, content)| (at.join(name), content.clone()))
                    .collect();
                let mut random = Random(seed.wrapping_mul(977).wrapping_add(index as u64 + 1) | 1);
                for slot in (1..files.len()).rev() {
                    files.swap(slot, random.below(slot as u64 + 1) as usize);
                }
                let (complaints, errors, pieces, stop) = (
                    Arc::clone(&complaints),
                    Arc::clone(&errors),
                    Arc::clone(&pieces),
                    Arc::clone(&stop),
                );
                std::thread::spawn(move || {
                    for (path, expected) in files {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        match read_in_pieces(&path, &pieces) {
                            Ok(got) if got == expected => {}
                            Ok(got) => complaints.lock().unwrap().push(format!(
                                "{}: {}",
                                path.display(),
                                first_difference(&got, &expected)
                            )),
                            Err(_) => {
                                errors.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                })
            })
            .collect();
        Self { threads, complaints, errors, pieces, stop }
    }

    fn finished(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits for all; complaints and the number of failed reads.
    fn join(self) -> (Vec<String>, usize) {
        for thread in self.threads {
            thread.join().unwrap();
        }
        let complaints = std::mem::take(&mut *self.complaints.lock().unwrap());
        (complaints, self.errors.load(Ordering::Relaxed))
    }
}

fn read_in_pieces(path: &Path, pieces: &AtomicUsize) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut file = std::fs::File::open(path)?;
    let mut content = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        let length = file.read(&mut piece)?;
        pieces.fetch_add(1, Ordering::Relaxed);
        if length == 0 {
            return Ok(content);
        }
        content.extend_from_slice(&piece[..length]);
    }
}

fn rounds() -> usize {
    std::env::var("LAMELLA_KILL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(10)
}

fn cold_world() -> World {
    let shape = LayerShape { files: 24, max_file_bytes: 400 << 10, ..LayerShape::default() };
    let mut world = World::new(&shape).unwrap();
    world.store_query = "?latency_ms=30".into();
    world.options = vec!["--sync-ms".into(), "100".into()];
    world
}

fn wait_until(what: &str, deadline: Duration, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + deadline;
    while !done() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn killed_at_random_moments_every_reader_gets_the_right_bytes() {
    let mut world = cold_world();
    let mut random = Random(0x5eed_cafe_f00d_0001);
    let (rounds, mut hits) = (rounds(), 0);
    world.start().unwrap();
    for round in 0..rounds {
        let victim = VICTIMS[round % VICTIMS.len()];
        let at = world.attach("readers").unwrap();
        wait_until("two keepers", Duration::from_secs(20), || {
            world.stats().is_ok_and(|stats| stats.keeper_pids.len() == 2)
        });
        let readers = Readers::start(&world, &at, round as u64 + 1);
        wait_until("a first read", Duration::from_secs(20), || {
            readers.pieces.load(Ordering::Relaxed) > 0
        });
        std::thread::sleep(Duration::from_micros(random.below(150_000)));
        let met = kill(&mut world, victim);
        hits += usize::from(met > 0);
        if !matches!(victim, Victim::Keeper(_) | Victim::BothKeepers) {
            std::thread::sleep(Duration::from_micros(random.below(60_000)));
            if matches!(victim, Victim::FsdAndSuccessor) {
                world.spawn().unwrap();
                std::thread::sleep(Duration::from_micros(random.below(150_000)));
                world.kill_fsd().unwrap();
            }
            world.start().unwrap();
        }
        wait_until("the end of all readers", Duration::from_secs(120), || readers.finished());
        let (complaints, errors) = readers.join();
        println!("round {round}: {victim:?}, {met} unanswered events, {errors} errors");
        assert!(complaints.is_empty(), "round {round} {victim:?}: {complaints:?}\n{}", world.log());
        assert_eq!(errors, 0, "round {round} {victim:?}\n{}", world.log());
        world.compare(&at).unwrap();
        assert!(world.detach("readers").unwrap());
        wait_until("the release of the layer", Duration::from_secs(10), || world.evict().is_ok());
    }
    println!("{hits} of {rounds} kills met an unanswered event");
    assert!(hits * 2 >= rounds, "only {hits} of {rounds} kills met an unanswered event");
    assert!(world.mounts().is_empty());
}

/// Kills, and answers how many events were unanswered then.
fn kill(world: &mut World, victim: Victim) -> usize {
    match victim {
        Victim::Fsd | Victim::FsdAndSuccessor => {
            world.kill_fsd().unwrap();
            world.unanswered().unwrap()
        }
        Victim::Keeper(index) => {
            let met = world.unanswered().unwrap();
            world.kill_keeper(index).unwrap();
            met
        }
        Victim::BothKeepers => {
            let met = world.unanswered().unwrap();
            world.kill_keeper(0).unwrap();
            world.kill_keeper(1).unwrap();
            met
        }
        Victim::FsdAndKeeper(index) => {
            world.kill_keeper(index).unwrap();
            world.kill_fsd().unwrap();
            world.unanswered().unwrap()
        }
    }
}

#[test]
fn without_a_restart_readers_wait_and_none_gets_a_wrong_byte() {
    let mut world = cold_world();
    world.start().unwrap();
    let at = world.attach("readers").unwrap();
    let readers = Readers::start(&world, &at, 99);
    wait_until("a first read", Duration::from_secs(20), || {
        readers.pieces.load(Ordering::Relaxed) > 0
    });
    wait_until("several blocked readers", Duration::from_secs(20), || {
        world.unanswered().is_ok_and(|count| count >= 3)
    });
    world.kill_keeper(0).unwrap();
    world.kill_fsd().unwrap();
    assert!(world.unanswered().unwrap() > 0, "nobody was blocked");
    std::thread::sleep(Duration::from_millis(200));
    let before = readers.pieces.load(Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(800));
    assert_eq!(readers.pieces.load(Ordering::Relaxed), before, "somebody was let go");
    assert!(!readers.finished() && readers.complaints.lock().unwrap().is_empty());
    // Only so that the threads can end; what they get now is compared too.
    world.start().unwrap();
    let (complaints, errors) = readers.join();
    assert!(complaints.is_empty() && errors == 0, "{complaints:?} {errors}\n{}", world.log());
}

#[test]
fn a_store_that_goes_away_gives_errors_or_waits_never_zeros() {
    let mut world = cold_world();
    let away = world.folder.path().join("away");
    world.store_query = format!("?latency_ms=5&fault_away_while_exists={}", away.display());
    world.options.extend(["--deadline-ms".into(), "600".into()]);
    world.start().unwrap();
    let at = world.attach("readers").unwrap();
    let (name, expected) = world.layer.files.iter().next().unwrap();
    assert!(std::fs::read(at.join(name)).unwrap() == *expected);
    std::fs::write(&away, "").unwrap();
    let readers = Readers::start(&world, &at, 5);
    wait_until("an error", Duration::from_secs(20), || readers.errors.load(Ordering::Relaxed) > 0);
    readers.stop.store(true, Ordering::Relaxed);
    let (complaints, errors) = readers.join();
    assert!(complaints.is_empty(), "{complaints:?}\n{}", world.log());
    assert!(errors > 0 && world.stats().unwrap().errors_answered > 0);
    std::fs::remove_file(&away).unwrap();
    world.compare(&at).unwrap();
}

/// Who is killed while keepers are replaced.
#[derive(Debug, Clone, Copy)]
enum Bystander {
    Nobody,
    Fsd,
    /// Any keeper: an old one, a new one, one that has no seat yet.
    AnyKeeper,
    FsdAndAnyKeeper,
}

const BYSTANDERS: [Bystander; 6] = [
    Bystander::Nobody,
    Bystander::Fsd,
    Bystander::AnyKeeper,
    Bystander::FsdAndAnyKeeper,
    Bystander::AnyKeeper,
    Bystander::FsdAndAnyKeeper,
];

fn same_program(pid: u32, program: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let inode = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    inode(&PathBuf::from(format!("/proc/{pid}/exe"))) == inode(program)
}

/// Whether two keepers sit there, of this program, and no other process is one.
fn replaced(world: &World) -> bool {
    let seated: Vec<u32> = (0..2).filter_map(|index| world.keeper_pid(index)).collect();
    let all = world.keeper_processes();
    seated.len() == 2
        && all.len() == 2
        && all.iter().all(|pid| seated.contains(pid) && same_program(*pid, &world.program))
}

#[test]
fn keepers_of_another_program_are_replaced_and_whoever_is_killed_meanwhile_no_reader_notices() {
    let mut world = cold_world();
    let mut random = Random(0x5eed_cafe_f00d_0002);
    let installed = ["one", "two"].map(|name| world.folder.path().join(name));
    for program in &installed {
        std::fs::copy(&world.program, program).unwrap();
    }
    world.program = installed[1].clone();
    world.start().unwrap();
    let (mut met, rounds) = (0, rounds().min(40));
    for round in 0..rounds {
        let at = world.attach("readers").unwrap();
        wait_until("two keepers", Duration::from_secs(20), || replaced(&world));
        let readers = Readers::start(&world, &at, round as u64 + 1);
        wait_until("a first read", Duration::from_secs(20), || {
            readers.pieces.load(Ordering::Relaxed) > 0
        });
        world.program = installed[round % 2].clone();
        world.kill_fsd().unwrap();
        let old = world.keeper_processes();
        world.spawn().unwrap();
        wait_until("a successor", Duration::from_secs(20), || world.keeper_processes() != old);
        std::thread::sleep(Duration::from_micros(random.below(25_000)));
        met += usize::from(!replaced(&world));
        let victim = BYSTANDERS[round % BYSTANDERS.len()];
        if matches!(victim, Bystander::Fsd | Bystander::FsdAndAnyKeeper) {
            world.kill_fsd().unwrap();
        }
        if matches!(victim, Bystander::AnyKeeper | Bystander::FsdAndAnyKeeper) {
            let keepers = world.keeper_processes();
            // One that has ended by itself meanwhile is as good as killed.
            let _ = fsd_world::kill(keepers[random.below(keepers.len() as u64) as usize]);
        }
        match victim {
            Bystander::Nobody | Bystander::AnyKeeper => world.wait_ready().unwrap(),
            Bystander::Fsd | Bystander::FsdAndAnyKeeper => world.start().unwrap(),
        }
        wait_until("the end of all readers", Duration::from_secs(120), || readers.finished());
        let (complaints, errors) = readers.join();
        println!("round {round}: {victim:?}, {errors} errors");
        assert!(complaints.is_empty(), "round {round} {victim:?}: {complaints:?}\n{}", world.log());
        assert_eq!(errors, 0, "round {round} {victim:?}\n{}", world.log());
        wait_until("new keepers", Duration::from_secs(20), || replaced(&world));
        world.compare(&at).unwrap();
        assert!(world.detach("readers").unwrap());
        wait_until("the release of the layer", Duration::from_secs(10), || world.evict().is_ok());
    }
    println!("{met} of {rounds} rounds met keepers that were not replaced yet");
    assert!(met > 0, "nothing was met");
    assert!(world.mounts().is_empty());
}

/// Another descriptor of the lock on a keeper's seat: while it is open the seat is taken, whatever became of
/// the keeper.
fn seat_lock(pid: u32) -> std::os::fd::OwnedFd {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let number = std::fs::read_dir(folder).unwrap().flatten().find_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let is_lock = target.to_string_lossy().ends_with("keeper-0.lock");
        is_lock.then(|| entry.file_name().to_str()?.parse().ok()).flatten()
    });
    let process = sys::process::pidfd_open(i32::try_from(pid).unwrap()).unwrap();
    let flags = rustix::process::PidfdGetfdFlags::empty();
    rustix::process::pidfd_getfd(process, number.unwrap(), flags).unwrap()
}

#[test]
fn a_keeper_that_alone_holds_everything_and_has_no_seat_yet_is_waited_for() {
    let mut world = cold_world();
    let next = world.folder.path().join("next");
    std::fs::copy(&world.program, &next).unwrap();
    world.start().unwrap();
    let at = world.attach("readers").unwrap();
    let readers = Readers::start(&world, &at, 7);
    wait_until("a first read", Duration::from_secs(20), || {
        readers.pieces.load(Ordering::Relaxed) > 0
    });
    let [first, second] = [0, 1].map(|index| world.keeper_pid(index).unwrap());
    let lock = seat_lock(first);
    world.program = next;
    world.kill_fsd().unwrap();
    world.spawn().unwrap();
    wait_until("the end of the first keeper", Duration::from_secs(20), || {
        !world.keeper_processes().contains(&first)
    });
    // Its successor holds everything, and cannot sit down before the lock is let go.
    world.kill_fsd().unwrap();
    fsd_world::kill(second).unwrap();
    world.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(lock);
    world.wait_ready().unwrap();
    wait_until("the end of all readers", Duration::from_secs(120), || readers.finished());
    let (complaints, errors) = readers.join();
    assert!(complaints.is_empty(), "{complaints:?}\n{}", world.log());
    assert_eq!(errors, 0, "{}", world.log());
    wait_until("new keepers", Duration::from_secs(20), || replaced(&world));
    world.compare(&at).unwrap();
    assert!(world.detach("readers").unwrap());
    world.drain(false).unwrap();
}
