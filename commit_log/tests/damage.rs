//! Bytes that are not what was written: found, named, and never passed over.

mod rig;

use std::path::Path;

use commit_log::{Lead, LogError, SegmentReport, inspect};
use env::sim::{self, Sim};
use proptest::prelude::*;
use rig::{DIR, Truth, World, key, open, small};

/// A log of several segments, some of them used again, closed in order or just left.
fn written(seed: u64, close: bool) -> (Sim, Truth) {
    let (env, mut sim) = sim::env(seed);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    for n in 0..100 + seed % 17 {
        world.submit(key(1, (n % 3) as u16), 1 + n % 2, 500, n % 7 == 0).unwrap();
        world.submit(key(2, 1), 1, 100, false).unwrap();
        if world.lead() == Lead::Full || n == 60 {
            world.file_oldest();
            assert_eq!(world.lead(), Lead::Idle);
        }
    }
    if close {
        world.log.close().unwrap();
    }
    let truth = world.truth.clone();
    drop(world);
    sim.kill();
    (sim, truth)
}

fn start(sim: &Sim, truth: &Truth) -> Result<World, LogError> {
    World::start(&sim.env(), small(), truth.clone())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn after_an_orderly_close_no_flipped_bit_goes_unnoticed(
        seed in 0u64..20, file in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), bit in 0u8..8,
    ) {
        let (sim, truth) = written(seed, true);
        let files: Vec<_> = sim.storage.list_all().into_iter().filter(|(path, _)| path.ends_with(".log")).collect();
        let (path, bytes) = &files[file.index(files.len())];
        sim.storage.corrupt(path, at.index(bytes.len()) as u64, 1 << bit).unwrap();
        // Either it is damage, or it hit nothing that counts: `start` compares all.
        if let Err(error) = start(&sim, &truth) {
            prop_assert!(matches!(error, LogError::Damaged { .. }), "{}", error);
        }
    }

    #[test]
    fn any_bytes_in_the_directory_give_a_log_or_an_error(
        seed in 0u64..5, file in any::<prop::sample::Index>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40), cut in any::<prop::sample::Index>(),
    ) {
        let (sim, _) = written(seed, false);
        let files: Vec<_> = sim.storage.list_all().into_iter().filter(|(path, _)| path.ends_with(".log")).collect();
        let (path, mut bytes) = files[file.index(files.len())].clone();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len() - cut.index(bytes.len()) / 2);
        sim.storage.write_file(&path, &bytes).unwrap();
        let _ = inspect(&sim.env(), Path::new(DIR)).unwrap();
        let _ = open(&sim.env(), small());
    }
}

/// The segments that are needed and have records, oldest first, without the record that says "closed".
fn needed(sim: &Sim) -> Vec<SegmentReport> {
    let mut segments = inspect(&sim.env(), Path::new(DIR)).unwrap().segments;
    segments.sort_by_key(|segment| segment.sequence);
    let oldest = segments.last().unwrap().oldest;
    segments.retain(|segment| segment.sequence >= oldest && segment.records > 0);
    segments.iter_mut().for_each(|segment| segment.end -= 64 * u64::from(segment.closed));
    segments
}

#[test]
fn a_damaged_middle_is_refused_and_named() {
    let (sim, truth) = written(1, true);
    let (mut refusals, mut passes) = (0, 0);
    for SegmentReport { file, end, .. } in needed(&sim) {
        for at in (8192..end).step_by(23) {
            let fork = sim.fork();
            fork.storage.corrupt(Path::new(DIR).join(&file), at, 0x10).unwrap();
            match start(&fork, &truth) {
                Err(LogError::Damaged { path, offset, lost, .. }) => {
                    assert!(path.ends_with(&file), "{path:?} for {file}");
                    assert!(offset <= at && at < offset + 2000, "offset {offset} for {at}");
                    assert!(lost.contains("records of segment"), "{lost}");
                    refusals += 1;
                }
                Err(error) => panic!("{error}"),
                // Between records are up to seven bytes that mean nothing; `start` has seen that all is there.
                Ok(_) => passes += 1,
            }
        }
    }
    assert!(refusals > 400 && passes < refusals / 50, "{refusals} refused, {passes} passed over");
}

/// Goal: the only damage that looks like a torn end is in the last write, of a log that was not closed.
#[test]
fn without_an_orderly_close_only_the_last_write_can_be_taken_for_torn() {
    let (sim, _) = written(2, false);
    let replay = |sim: &Sim| open(&sim.env(), small()).map(|(_, replayed)| replayed.len());
    let whole = replay(&sim.fork()).unwrap();
    let newest = needed(&sim).pop().unwrap();
    let last_write = newest.last_batch;
    for at in (8192..newest.end).step_by(61) {
        let fork = sim.fork();
        fork.storage.corrupt(Path::new(DIR).join(&newest.file), at, 1).unwrap();
        match replay(&fork) {
            Ok(replayed) => assert!(at >= last_write && whole - replayed <= 2, "{at}: {replayed} of {whole}"),
            Err(error) => assert!(at < last_write && matches!(error, LogError::Damaged { .. }), "{at}: {error}"),
        }
    }
}

#[test]
fn a_missing_or_short_or_foreign_segment_is_refused() {
    let (sim, truth) = written(3, true);
    for SegmentReport { file, .. } in needed(&sim) {
        let path = Path::new(DIR).join(&file);
        let bytes = sim.storage.read_file(&path).unwrap();

        let gone = sim.fork();
        gone.env().storage.remove_file(&path).unwrap();
        let error = start(&gone, &truth).err().unwrap().to_string();
        assert!(error.contains("missing"), "{error}");

        let short = sim.fork();
        short.storage.write_file(&path, &bytes[..bytes.len() - 4096]).unwrap();
        let error = start(&short, &truth).err().unwrap().to_string();
        assert!(error.contains("12288: the file ends there"), "{error}");

        let twice = sim.fork();
        twice.storage.write_file(Path::new(DIR).join("00000099.log"), &bytes).unwrap();
        let error = start(&twice, &truth).err().unwrap().to_string();
        assert!(error.contains("a second segment"), "{error}");

        let (foreign, _) = written(4, true);
        let other = foreign.storage.read_file(&path).unwrap();
        let mixed = sim.fork();
        mixed.storage.write_file(&path, &other).unwrap();
        let error = start(&mixed, &truth).err().unwrap().to_string();
        assert!(error.contains("belongs to another log"), "{error}");
    }
}

#[test]
fn files_that_are_not_segments_are_left_alone() {
    let (sim, truth) = written(5, true);
    let notes = Path::new(DIR).join("notes.txt");
    sim.storage.write_file(&notes, b"mine").unwrap();
    start(&sim, &truth).unwrap();
    assert_eq!(sim.storage.read_file(&notes).unwrap(), b"mine");
}

#[test]
fn an_inspection_tells_what_is_in_each_segment_and_changes_nothing() {
    let (sim, truth) = written(6, true);
    sim.storage.start_trace();
    let report = inspect(&sim.env(), Path::new(DIR)).unwrap();
    assert!(sim.storage.take_trace().is_empty());
    assert_eq!(report.segments.iter().filter(|segment| segment.closed).count(), 1);
    let newest = |vb: u16| {
        let ranges = report.segments.iter().flat_map(|segment| &segment.ranges);
        ranges.filter(|range| range.bucket.ends_with('1') && range.vb == vb).map(|range| range.last).max()
    };
    for vb in 0..3 {
        assert_eq!(newest(vb), Some(truth.vbs[&(1, vb)].high()));
    }
    for range in report.segments.iter().flat_map(|segment| &segment.ranges) {
        assert_eq!(range.items, range.last - range.first + 1);
    }
    let json = serde_json::to_value(&report).unwrap();
    assert!(json["segments"][0]["ranges"][0]["first"].is_u64(), "{json}");
}

/// Goal: what a torn write left is never taken for the continuation of a later one. Method: the first of two records of one
/// write is lost; after a restart the same record is written again, byte for byte, and ends just where the second begins.
#[test]
fn a_piece_of_a_torn_write_is_not_taken_for_what_follows() {
    let (env, mut sim) = sim::env(7);
    // With headers, one block each.
    let value_bytes = 4096 - 64 - 40 - 6;
    let submit = |world: &mut World, vb: u16| world.submit(key(1, vb), 1, value_bytes, false).unwrap();
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    (1..=2).for_each(|vb| submit(&mut world, vb));
    world.lead();
    sim.storage.corrupt(Path::new(DIR).join("00000001.log"), 8192 + 100, 1).unwrap();

    let mut world = World::start(&sim.kill(), small(), Truth::default()).unwrap();
    assert!(world.truth.vbs.is_empty(), "nothing was replayed");
    submit(&mut world, 1);
    world.lead();
    World::start(&sim.kill(), small(), world.truth).unwrap();
}

/// Goal: a log whose newest header is destroyed is not opened as if its newest segment had never been.
#[test]
fn a_destroyed_header_of_the_newest_segment_is_refused() {
    let (sim, truth) = written(8, true);
    let newest = needed(&sim).pop().unwrap();
    let slot = newest.slots.iter().position(|slot| *slot == newest.sequence.unwrap().to_string()).unwrap();
    // A segment that is ready, but without records, would know of this one.
    let ready: Vec<_> = inspect(&sim.env(), Path::new(DIR)).unwrap().segments;
    for segment in ready.iter().filter(|segment| segment.sequence > newest.sequence) {
        sim.env().storage.remove_file(&Path::new(DIR).join(&segment.file)).unwrap();
    }
    sim.storage.corrupt(Path::new(DIR).join(&newest.file), slot as u64 * 4096 + 20, 1).unwrap();
    let error = start(&sim, &truth).err().unwrap().to_string();
    assert!(error.contains("but no header that says so"), "{error}");
}

#[test]
fn a_damaged_segment_of_a_single_write_is_refused() {
    let (env, mut sim) = sim::env(7);
    let mut world = World::start(&env, small(), Truth::default()).unwrap();
    (1..=2).for_each(|vb| world.submit(key(1, vb), 1, 5000, false).unwrap());
    world.lead();
    sim.storage.corrupt(Path::new(DIR).join("00000001.log"), 8192 + 100, 1).unwrap();
    sim.kill();
    let error = start(&sim, &world.truth).err().unwrap().to_string();
    assert!(error.contains("00000001.log@8192"), "{error}");
}
