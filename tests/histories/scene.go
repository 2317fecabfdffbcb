package histories

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// patience is how long anything may take that has to happen by itself.
const patience = 30 * time.Second

const seedSaid = "SETTEE_HISTORIES_SEED"

// drawn is the seed of this run.
var drawn uint64

// scene is a cluster under load, to which things happen. It ends by a look at the whole.
type scene struct {
	*testing.T
	*cluster
	load *load
	dice *rand.Rand
	cuts [][2]int
}

// theSeed is drawn, or given by SETTEE_HISTORIES_SEED. What clients ask for and which nodes are hit is drawn from it; how fast
// they are answered is not, so that the same seed is the same load, not the same history.
func theSeed() (uint64, error) {
	if text := os.Getenv(seedSaid); text != "" {
		return strconv.ParseUint(text, 10, 64)
	}
	return uint64(time.Now().UnixNano()), nil
}

// seedOf is another one for each test.
func seedOf(t *testing.T) uint64 {
	name := fnv.New64()
	_, _ = name.Write([]byte(t.Name()))
	return drawn ^ name.Sum64()
}

// play starts nodes, lets `happen` happen to them under load of these levels, and checks what the clients were told.
func play(t *testing.T, nodes, replicas int, first layout, levels []uint8, happen func(*scene)) {
	t.Parallel()
	seed := seedOf(t)
	c, err := newCluster(t.TempDir(), nodes, replicas, first)
	t.Cleanup(func() {
		if err := c.stop(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatalf("%v\n%s", err, c.logs())
	}
	s := &scene{T: t, cluster: c, load: startLoad(c, seed, levels...), dice: rand.New(rand.NewPCG(seed, 1<<32))}
	defer func() {
		s.load.end()
		if t.Failed() {
			t.Log(c.logs())
		}
	}()
	s.writes(200)
	happen(s)
	s.heal()
	s.load.end()
	s.look()
	s.report()
}

// twoAndThree plays with two nodes and one replica, and with three and two.
func twoAndThree(t *testing.T, first layout, levels []uint8, happen func(*scene)) {
	t.Parallel()
	for nodes := 2; nodes <= 3; nodes++ {
		t.Run(fmt.Sprintf("%d nodes", nodes), func(t *testing.T) { play(t, nodes, nodes-1, first, levels, happen) })
	}
}

// must ends the scene if something that is no matter of histories fails.
func (s *scene) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// writes waits until so many more durable writes were acknowledged.
func (s *scene) writes(count int64) {
	s.Helper()
	until := time.Now().Add(patience)
	for goal := s.load.acknowledged.Load() + count; s.load.acknowledged.Load() < goal; time.Sleep(pace) {
		if time.Now().After(until) {
			s.Fatalf("%d of %d durable writes were not acknowledged within %v", goal-s.load.acknowledged.Load(), count, patience)
		}
	}
}

// lasts lets a state last.
func (s *scene) lasts(span time.Duration) {
	time.Sleep(span)
}

func (s *scene) kill(numbers ...int) {
	for _, number := range numbers {
		s.nodes[number].kill()
	}
}

func (s *scene) standStill(number int) {
	s.nodes[number].signal(syscall.SIGSTOP)
}

func (s *scene) goOn(number int) {
	s.nodes[number].signal(syscall.SIGCONT)
}

// mute has what one node sends to another be lost.
func (s *scene) mute(from, to int) {
	s.Helper()
	s.must(s.nodes[from].mute(s.nodes[to].place))
	s.cuts = append(s.cuts, [2]int{from, to})
}

// cut has two nodes hear nothing of each other.
func (s *scene) cut(one, other int) {
	s.Helper()
	s.mute(one, other)
	s.mute(other, one)
}

func (s *scene) heal() {
	s.Helper()
	for _, cut := range s.cuts {
		s.must(s.nodes[cut[0]].unmute(s.nodes[cut[1]].place))
	}
	s.cuts = nil
}

// look reads every key, writes it where that can be durable, and waits until its replicas have the same.
func (s *scene) look() {
	s.Helper()
	last := s.load.client(clientCount)
	for n := range keyCount {
		name, vb := key(n)
		chain := s.where(vb)
		if len(chain) > (s.replicas+1)/2 {
			s.ask(last, chain[0], vb, func() Op {
				return Op{Key: name, Kind: Set, Level: 3, Writes: Version(s.load.versions.Add(1))}
			}, nil)
		}
		found := s.ask(last, chain[0], vb, func() Op { return Op{Key: name, Kind: Get} }, nil).Found
		for _, number := range chain[1:] {
			s.ask(last, number, vb, func() Op { return Op{Key: name, Kind: Replica} }, &found)
		}
	}
	last.leave()
}

// ask asks until there is an answer, and the one that has to come.
func (s *scene) ask(c *client, number, vb int, request func() Op, wants *Version) Op {
	s.Helper()
	until := time.Now().Add(patience)
	for {
		op := c.ask(number, vb, request())
		if op.Outcome == Done && (wants == nil || op.Found == *wants) {
			return op
		}
		if time.Now().After(until) {
			c.leave()
			s.report()
			s.Fatalf("%s at node %d after %v: %v", op.Key, number, patience, op)
		}
		time.Sleep(pace)
	}
}

// report checks the history and says what it was made of.
func (s *scene) report() {
	s.Helper()
	count := map[Outcome]int{}
	for _, op := range s.load.history {
		count[op.Outcome]++
	}
	s.Logf("%d requests: %v; %d durable writes acknowledged", len(s.load.history), count, s.load.acknowledged.Load())
	for _, err := range s.load.strange {
		s.Error(err)
	}
	if err := Check(s.load.history); err != nil {
		s.Error(err)
	}
}
