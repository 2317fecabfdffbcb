/// Random numbers good enough for secrets in the real environment, replayable in the simulated one.
pub trait Rng: Send + Sync {
    fn fill(&self, bytes: &mut [u8]);
    fn u64(&self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_be_bytes(bytes)
    }
}
